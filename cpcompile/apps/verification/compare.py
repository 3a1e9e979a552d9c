"""Compare the tensors of a rank with those of one process."""

from __future__ import annotations

from statistics import median

from torch import Tensor

from cpcompile.apps.verification.bounds import (
    deviation_where_defined,
    gradient_floor,
    largest,
    share_of_error,
)
from cpcompile.apps.verification.differences import Check
from cpcompile.apps.verification.steps import Reference


def compared(got: dict[str, Tensor], by: Reference, rank: int) -> list[Check]:
    """Make a check for every tensor that one process or this rank has.

    A gradient of zeros may be missing: AOTAutograd gives zeros where eager gives None.
    """
    grads = [x for name, x in by.exact.items() if name.startswith("gradient ")]
    most = max(map(largest, grads), default=0.0)

    results = [x for name, x in by.exact.items() if name.startswith("result ")]
    # A loss that verify makes is a sum in which results cancel.
    makes_loss = all(x.ndim for x in results)
    of_loss = max(map(largest, results), default=0.0) if makes_loss else 0.0

    def floor_of(full: str) -> float:
        if full.startswith("gradient "):
            return gradient_floor(by.exact[full], most)
        return of_loss if full.startswith("loss ") else 0.0

    shares: dict[str, list[float]] = {}
    for full, exact in by.exact.items():
        rough = [x[full] for x in by.rough if full in x]
        if exact.is_floating_point():
            share = share_of_error(exact, rough, floor_of(full))
            shares.setdefault(full.split(" ", 1)[0], []).append(share)
    usual = {kind: median(x) for kind, x in shares.items()}
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
        expected = exact, [x[full] for x in by.rough], floor_of(full)
        deviation = deviation_where_defined(
            full, value, *expected, usual.get(kind, 0.0)
        )
        checks.append(Check(kind, name, deviation.error, deviation.bound, rank))
    return checks
