"""A golden is small enough to be read, and compared as all others are."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LINES, COLUMNS = 25, 100
HERE = Path(__file__).parent
TESTS = HERE.parent
COMPARISONS = ("assert_golden", "assert_expected_inline")


class ExpectedText(NamedTuple):
    """A text in a test, and the function that compares it."""

    path: Path
    line: int
    comparison: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(TESTS)}:{self.line}"

    @property
    def is_golden(self) -> bool:
        return HERE in self.path.parents


def expected_texts() -> Iterator[ExpectedText]:
    """Every text of the tests that EXPECTTEST_ACCEPT=1 would write, in any folder."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            function = getattr(node, "func", None)
            name = getattr(function, "id", getattr(function, "attr", None))
            if name in COMPARISONS:
                text = ast.literal_eval(node.args[1])
                yield ExpectedText(path, node.lineno, name, text)


def test_all_texts_are_short():
    """See docs/contributing.md for what to do with a longer one."""
    texts = list(expected_texts())
    assert [x.place for x in texts if len(x.text.splitlines()) > LINES] == []
    assert len({x.path for x in texts if not x.is_golden}) > 10


def test_goldens_are_narrow_and_compared_alike():
    goldens = [x for x in expected_texts() if x.is_golden]
    assert len(goldens) > 50
    assert HERE / "test_send_in_buckets.py" in {x.path for x in goldens}
    assert [x.place for x in goldens if x.comparison != "assert_golden"] == []
    too_wide = [
        x.place for x in goldens for y in x.text.splitlines() if len(y) > COLUMNS
    ]
    assert too_wide == []
