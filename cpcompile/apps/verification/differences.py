"""Plain data: what a verification compares, and where a difference is made."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One tensor on the rank where it is farthest from what it should be.

    kind: "result", "loss", "gradient", "weight" or "buffer".
    bound: how large the error may be. problem: what is wrong but for the number.
    """

    kind: str
    name: str
    error: float
    bound: float
    rank: int
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether the tensor is right."""
        return not self.problem and self.error <= self.bound

    @property
    def share(self) -> float:
        """The error as a share of the bound; infinite where something else is wrong."""
        if self.problem or math.isnan(self.error):
            return math.inf
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound else math.inf


@dataclass(frozen=True)
class CallPlace:
    """The first call of the model whose value differs.

    what: "the value" or "the gradient". call: as the model writes it; node: its name in
    the graph. written: what the passes made of it. read_by: the calls whose backward
    makes the gradient. path: of the module; line: "file:number: source".
    dtype: in which the difference was found.
    """

    what: str
    call: str
    node: str
    written: str
    read_by: tuple[str, ...]
    path: str
    line: str
    error: float
    bound: float
    rank: int
    dtype: str
