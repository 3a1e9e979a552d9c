"""Fixes of torch have a row in the docs, and private names of torch a comment."""

import re
from collections.abc import Iterator
from pathlib import Path

from tools.docs_pages import private_attributes, private_imports

ROOT = Path(__file__).parents[3]
INTERNALS = ROOT / "docs" / "internals"
FIXES = ROOT / "cpcompile" / "torch_patches"


def rows(page: str, header: str = "| file |") -> list[list[str]]:
    """Cells of the rows of a page's table that begins so, without its header."""
    text = (INTERNALS / page).read_text(encoding="utf-8")
    table = text[text.index(header) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]


def modules() -> Iterator[Path]:
    """Modules in which no private name of torch is expected."""
    homes = [ROOT / "cpcompile" / name for name in ("torch_patches", "torch_private")]
    link = ROOT / "cpcompile" / "passes"
    for folder in ("cpcompile", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {*homes, link} & {*path.parents}:
                yield path


def test_every_fix_has_a_row_with_its_test():
    listed = {row[0].strip("`"): row for row in rows("torch_fixes.md")}
    files = {path.name for path in FIXES.glob("*.py")}
    assert listed.keys() == files - {"__init__.py", "inductor_compat.py"}
    for _, what, versions, tests in listed.values():
        assert what and re.match(r"2\.\d+", versions)
        named = re.findall(r"`([^`]+)`", tests)
        assert named and all((ROOT / test).is_file() for test in named), tests


def test_private_names_are_imported_in_one_place():
    """Elsewhere a comment above the import says why, and where it was seen."""
    bare = {
        str(path.relative_to(ROOT)): name
        for path in modules()
        for name, comment in private_imports(path)
        if "seen in" not in comment.lower()
    }
    assert not bare, (
        f"{bare} are private; hand them on in the file of cpcompile/torch_private that "
        "is about the same, or write above the import what it is for and which "
        "versions of torch it was seen in"
    )


def test_private_names_are_found(tmp_path):
    # In a function, under another name, by its module alone; with their comments.
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.fx\n\n# Its reason;\n# seen in 2.13.\nimport torch._dynamo as d\n"
        "from torch import nn\n\n"
        "def f():\n    from torch.utils import _pytree as tree\n"
        "from ._relative import x\n"
    )
    reason = "Its reason; seen in 2.13."
    assert [*private_imports(path)] == [
        ("torch._dynamo", reason),
        ("torch.utils._pytree", ""),
    ]
    path = tmp_path / "module.py"
    path.write_text(
        "def f(x):\n    self._own = x._made = 1\n    return x._base._made\n"
    )
    assert private_attributes(path) == {"x._base"}
