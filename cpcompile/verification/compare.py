"""The tensors of a rank beside those of one process."""

from __future__ import annotations

from torch import Tensor

from cpcompile.verification.bounds import (
    deviation_where_defined,
    gradient_floor,
    largest,
)
from cpcompile.verification.records import Check
from cpcompile.verification.steps import Reference


def compared(got: dict[str, Tensor], by: Reference, rank: int) -> list[Check]:
    """A check for every tensor that one process or this rank has.

    A gradient of zeros may be missing: AOTAutograd gives zeros where eager gives None.
    """
    grads = [x for name, x in by.exact.items() if name.startswith("gradient ")]
    most = max(map(largest, grads), default=0.0)
    checks = []
    for full in dict.fromkeys([*by.exact, *got]):
        kind, name = full.split(" ", 1)
        if full not in got or full not in by.exact:
            if kind == "gradient" and not (got | by.exact)[full].any():
                continue
            problem = "missing" if full not in got else "one process has none"
            checks.append(Check(kind, name, 0.0, 0.0, rank, problem))
            continue
        value, exact = got[full], by.exact[full]
        if value.shape != exact.shape:
            problem = f"has shape {list(value.shape)}, not {list(exact.shape)}"
            checks.append(Check(kind, name, 0.0, 0.0, rank, problem))
            continue
        floor = gradient_floor(exact, most) if kind == "gradient" else 0.0
        rough = [x[full] for x in by.rough]
        found = deviation_where_defined(full, value, exact, rough, floor)
        checks.append(Check(kind, name, found.error, found.bound, rank))
    return checks
