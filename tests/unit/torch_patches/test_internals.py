"""The tables of docs/internals name files that exist, and every fix has its row."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INTERNALS = ROOT / "docs" / "internals"
FIXES = ROOT / "cpcompile" / "torch_patches"


def rows(page: str) -> list[list[str]]:
    """Cells of the rows of a page's table, without its header."""
    text = (INTERNALS / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


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
