"""Compare the tensors of ranks with those of one process.

Each rank finds the errors of its tensors, and one process how large they may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from cpcompile.apps.verification.bounds import (
    bound_where_defined,
    error_where_defined,
    gradient_floor,
    largest,
    share_of_error,
)
from cpcompile.apps.verification.steps import Reference


@dataclass(frozen=True)
class Check:
    """One tensor on the rank where it is farthest from what it should be.

    kind: "result", "loss", "gradient", "weight" or "buffer"; of modules "forward" (an
    output) or "backward" (its gradient). bound: how large the error may be. problem:
    what is wrong but for the number.
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


Errors = Mapping[str, tuple[float, str]]
"""For every tensor its error, or what is wrong but for the number."""


def errors_of(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Compare every tensor that one process or this rank has.

    A gradient of zeros may be missing: AOTAutograd gives zeros where eager gives None.
    """
    errors: dict[str, tuple[float, str]] = {}
    for name in dict.fromkeys([*exact, *got]):
        if name not in got or name not in exact:
            only = got[name] if name in got else exact[name]
            if _is_gradient(name) and not only.any():
                continue
            problem = "missing" if name not in got else "one process has none"
            errors[name] = 0.0, problem
        elif got[name].shape != exact[name].shape:
            have, need = list(got[name].shape), list(exact[name].shape)
            errors[name] = 0.0, f"has shape {have}, not {need}"
        else:
            errors[name] = error_where_defined(got[name], exact[name]), ""
    return errors


def checks_of(ranks: Sequence[Errors], by: Reference) -> list[Check]:
    """Make a check for every tensor, on the rank where it is farthest off."""
    bounds = _bounds(by)
    checks: dict[str, Check] = {}
    for rank, errors in enumerate(ranks):
        for full, (error, problem) in errors.items():
            limit = 0.0 if problem else bounds[full]
            kind, name = full.split(" ", 1)
            check = Check(kind, name, error, limit, rank, problem)
            if full not in checks or check.share > checks[full].share:
                checks[full] = check
    return list(checks.values())


def _bounds(by: Reference) -> dict[str, float]:
    """Return how large the error of each tensor may be."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for full, exact in by.exact.items():
        kinds.setdefault(full.split(" ", 1)[0], {})[full] = exact
    # A loss that verify makes is a sum in which results cancel.
    results = kinds.get("result", {}).values()
    makes_loss = all(x.ndim for x in results)
    of_loss = max(map(largest, results), default=0.0) if makes_loss else 0.0
    bounds: dict[str, float] = {}
    for kind, tensors in kinds.items():
        most = max(map(largest, tensors.values()))
        floors = dict.fromkeys(tensors, of_loss if kind == "loss" else 0.0)
        if _is_gradient(f"{kind} "):
            floors = {name: gradient_floor(x, most) for name, x in tensors.items()}
        rough = {name: [x[name] for x in by.rough if name in x] for name in tensors}
        usual = median(
            share_of_error(x, rough[name], floors[name]) for name, x in tensors.items()
        )
        for name, x in tensors.items():
            bounds[name] = bound_where_defined(x, rough[name], floors[name], usual)
    return bounds


def _is_gradient(name: str) -> bool:
    return name.startswith(("gradient ", "backward "))
