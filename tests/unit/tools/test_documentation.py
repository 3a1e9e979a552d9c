"""The documentation builds, and every link and anchor in it exists."""

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_broken_link_is_an_error(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[there](b.md#c)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\nstrict: true\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0


def test_pages_load_nothing_from_elsewhere(site):
    text = (site / "index.html").read_text()
    for kind in ('src="http', '<link rel="stylesheet" href="http', "@import"):
        assert kind not in text
