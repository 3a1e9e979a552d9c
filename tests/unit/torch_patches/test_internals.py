"""The tables of docs/internals are complete: files, fixes, imports of private names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INTERNALS = ROOT / "docs" / "internals"
FIXES = ROOT / "cpcompile" / "torch_patches"


def rows(page: str, header: str = "| file |") -> list[list[str]]:
    """Cells of the rows of a page's table that begins so, without its header."""
    text = (INTERNALS / page).read_text(encoding="utf-8")
    table = text[text.index(header) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]


def private_imports(path: Path) -> Iterator[str]:
    """Names that a file imports from torch, and of which a part begins with _."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            if first == "torch" and any(part.startswith("_") for part in parts):
                yield name


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


@pytest.mark.parametrize("row", rows("private_interfaces.md"), ids=lambda row: row[0])
def test_files_with_private_interfaces_exist(row):
    files = re.findall(r"`([^`]+\.py)`", row[0])
    assert files
    for name in files:
        known = [*(ROOT / "cpcompile").rglob(name), *(ROOT / "passes").rglob(name)]
        assert (ROOT / name).is_file() or known, name


def test_private_names_are_imported_in_one_place():
    listed = {row[0].strip("`") for row in rows("private_interfaces.md", "| module |")}
    imported = {
        str(path.relative_to(ROOT)): names
        for path in modules()
        if (names := sorted(private_imports(path)))
    }
    new = {path: names for path, names in imported.items() if path not in listed}
    assert not new, (
        f"{new} are private; hand them on in the file of cpcompile/torch_private that "
        "is about the same, with the version they were seen in, or give the module a "
        "row with a reason in docs/internals/private_interfaces.md"
    )
    gone = listed - imported.keys()
    assert not gone, f"docs/internals/private_interfaces.md: no private names in {gone}"


def test_the_home_of_private_names_is_listed():
    header = "| file in `cpcompile/torch_private` |"
    listed = [row[0].strip("`") for row in rows("private_interfaces.md", header)]
    files = {path.name for path in (ROOT / "cpcompile" / "torch_private").glob("*.py")}
    assert {*listed} == files - {"__init__.py"} and len(listed) == len({*listed})


def test_one_private_import_is_found(tmp_path):
    """In a function, under another name, and by its module alone."""
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.fx\nimport torch._dynamo as d\nfrom torch import nn\n"
        "def f():\n    from torch.utils import _pytree as tree\n"
        "from ._relative import x\n"
    )
    assert sorted(private_imports(path)) == ["torch._dynamo", "torch.utils._pytree"]
