"""The documentation builds, its links and Notes exist, and a release works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import docs_pages, release

ROOT = Path(__file__).parents[3]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    options = ["--config-file", str(root / "mkdocs.yml"), "--site-dir", str(site)]
    return subprocess.run(
        [*command, *options], cwd=root, capture_output=True, text=True, timeout=170
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT, made)
    assert done.returncode == 0, done.stderr
    return made


def test_the_documentation_builds_without_a_warning(site):
    page = (site / "reference/api/index.html").read_text()
    assert "cpcompile.shard_parameters" in page  # from its docstring
    text = (site / "index.html").read_text()
    for kind in ('src="http', '<link rel="stylesheet" href="http', "@import"):
        assert kind not in text
    page = (site / "internals/passes/index.html").read_text()
    for name in ("find_attention", "tile_tokens", "expand_ring", "save_by_budget"):
        assert f'<h3 id="{name}">' in page
    assert "layout_cut.py" in page
    assert "causal/llama" in (site / "families/index.html").read_text()
    page = (site / "internals/private_interfaces/index.html").read_text()
    assert "torch._functorch._aot_autograd.autograd_cache" in page


def test_a_broken_link_is_an_error(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[there](b.md#c)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\nstrict: true\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0


def test_notes_that_pages_cite_exist():
    notes = set(re.findall(r"^## (.*)$", docs_pages.notes(), re.MULTILINE))
    cited = set()
    for path in (ROOT / "docs").rglob("*.md"):
        text = " ".join(path.read_text(encoding="utf-8").split())
        for names in re.findall(r"\bNotes? ((?:(?:, | and )?\[[^\]]+\])+)", text):
            cited |= set(re.findall(r"\[([^\]]+)\]", names))
    assert len(cited) > 20 and cited <= notes
    for path in (ROOT / "docs" / "ideas").glob("*.md"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 120, path


def test_a_tag_of_another_version_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"the tag is v9.9.9 and the version of pypr"):
        release.main(["--tag", "v9.9.9", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_wheel_and_sdist_are_whole(tmp_path, capfd):
    release.main(["--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2
    assert capfd.readouterr().out.count("trained a step with") == 2
