"""Which mutants are drawn, which tests they meet, and what the report says."""

import ast

import pytest

from tools.mutants.__main__ import covering, gains
from tools.mutants.mutations import Mutant, draw, statement

SOURCE = """\
import functools

@functools.cache
def f(a: int | None = 1) -> int | None:
    \"\"\"Return.\"\"\"
    if a == 1:
        return (
            a +
            7
        )
    return a
"""
FILE = "passes/flow/f.py"


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    for name in ("cpcompile", "tests", "tools", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "cpcompile/passes").symlink_to("../passes")
    return tmp_path


def test_mutants_change_one_place_each(tree):
    """Not annotations, nor decorators that only save time; a file counts once."""
    mutants = draw(tree, 9)
    assert draw(tree, 9) == mutants
    assert draw(tree, 2) == mutants[:2]
    assert {(x.area, x.file) for x in mutants} == {("passes/flow", FILE)}
    assert sorted(x.line for x in mutants) == [4, 6, 6, 6, 8, 9]
    changed = {ast.unparse(ast.parse(x.source(tree))) for x in mutants}
    assert len(changed) == 6 and ast.unparse(ast.parse(SOURCE)) not in changed


@pytest.mark.parametrize(
    ("line", "lines"),
    [(1, [1]), (3, [3, 4]), (6, [6]), (9, [7, 8, 9, 10]), (11, [11])],
)
def test_the_statement_around_a_line(line, lines):
    assert list(statement(SOURCE, line)) == lines


def test_tests_and_lines(tree):
    # Of a line that runs on import, those that run anything of the file.
    lines = {FILE: {4: {""}, 6: {"a", "b"}, 7: {"a"}}}
    mutants = [Mutant("", FILE, line, "", 0) for line in (4, 6, 9, 11)]
    assert [covering(x, tree, lines) for x in mutants] == [
        {"a", "b"},
        {"a", "b"},
        {"a"},
        set(),
    ]
    # Those with most new lines per second come first.
    lines = {"f": {1: {"t::a[1]", "t::b"}, 2: {"t::a[2]", ""}, 3: {"t::b"}, 4: {""}}}
    outcomes = {"t::a[1]": (1, True), "t::a[2]": (1, True), "t::b": (1, True)}
    assert gains(lines, outcomes) == {"t::b": 2, "t::a": 1}
