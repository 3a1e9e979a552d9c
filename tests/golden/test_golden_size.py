"""A golden is small enough to be read, and compared as all others are."""

import ast
from pathlib import Path

LINES, COLUMNS = 25, 100
HERE = Path(__file__).parent
COMPARISONS = ("assert_golden", "assert_expected_inline")


def goldens():
    """(file and line, function that compares, expected text) of every golden."""
    for path in HERE.glob("*/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", None)
            if name in COMPARISONS:
                expected = node.args[1].value
                yield f"{path.relative_to(HERE)}:{node.lineno}", name, expected


def test_all_goldens_are_small():
    """See docs/contributing.md for what to do with a larger one."""
    found = list(goldens())
    assert len(found) > 90
    assert [place for place, name, _ in found if name != "assert_golden"] == []
    sizes = [(place, text.splitlines()) for place, _, text in found]
    assert [place for place, lines in sizes if len(lines) > LINES] == []
    widest = [(place, max(map(len, lines), default=0)) for place, lines in sizes]
    assert [place for place, columns in widest if columns > COLUMNS] == []
