"""Run calls that do the same with every token as one call on the tokens of a rank.

DTensor has no part in what happens between sorting tokens by their expert and bringing
them back: a rank sorts its own tokens, and the others do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...graph.constant_arguments import GraphArgument


@dataclass(frozen=True, repr=False, eq=False)
class RowProgram(GraphArgument):
    """A program that does the same with every row of some arguments.

    graph: graph(rows, *args) gives one tensor or several, for any number of rows.
    name: of what it does.
    arguments: which arguments have a row per token, along dimension 0; the others are
        the same for all tokens.
    results: which results have a row per token, in the order of their leaves; the
        others are sums over the tokens.
    not_counted: where all results are sums, for each argument a number that adds
        nothing to them, or None if its rows may have any number. None if it is not
        known.
    """

    name: str
    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    not_counted: tuple[int | None, ...] | None = None

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.name

    def text(self) -> str:
        return f"{self.arguments} {self.results} {super().text()}"


def cp_row_parallel(program: RowProgram, *args: Tensor) -> Any:
    """Run a program on all rows; `localise` runs it on those of a rank."""
    of_rows = [x for x, has in zip(args, program.arguments, strict=True) if has]
    return program.run(of_rows[0].shape[0], *args)
