"""Runs the kernels of a step in the interpreter, and compares them with step_cases."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import RowLimits
from tests.kernels.step_cases import (
    SMALLEST_STEP,
    UNIT,
    UNIT_FLOAT32,
    Reference,
    StepCase,
    changes,
    operand,
    reference,
    vector,
)


def run_and_check(interpreter: Callable[..., Any], case: StepCase) -> None:
    torch.manual_seed(0)
    D, E = case.head_dim, case.value_dim or case.head_dim
    q = operand(case, case.heads, case.rows, D)
    k = operand(case, case.kv_heads, case.keys, D)
    v = operand(case, case.kv_heads, case.keys, E)
    grad = operand(case, case.heads, case.rows, E)
    expected = reference(case, grad, q, k, v)
    vectors = (vector(x, case.rows) for x in (case.upper, case.lower))
    rest = (RowLimits(case.visible, *vectors), case.scale, case.final)
    more = {"changes": changes(case), "config": case.config}
    dk_in, dv_in, dq_in = (torch.randn(x.shape) for x in (k, v, q))
    add = case.accumulate

    state = (expected.out_in, expected.lse_in) if add else (None, None)
    out, lse = interpreter("forward", q, k, v, *state, *rest, **more)
    check("out", out, expected, case, None)
    check("lse", lse, expected, case, None)

    shared = (grad, q, k, v, expected.lse, expected.delta)
    for kernel, sums in (
        (Kernel.DKDV, {"dk": dk_in, "dv": dv_in}),
        (Kernel.DQ, {"dq": dq_in}),
    ):
        given = (*shared, [*sums.values()] if add else [], *rest)
        results = interpreter("gradients", kernel, *given, **more)
        for (name, before), got in zip(sums.items(), results, strict=True):
            check(name, got, expected, case, before if add else None)

    if more["changes"].biasing is None:
        return
    if case.visible.rows is case.visible.keys is None and "of spans" not in case.bias:
        more["config"] = case.square
        found = interpreter("dbias", *shared, *rest[:-1], **more)
        check("dbias", found, expected, case, None)


def check(
    name: str, got: Tensor, expected: Reference, case: StepCase, before: Tensor | None
) -> None:
    """`before` is what was accumulated; the sum is rounded, and the result if final."""
    want, limit = expected.values[name], expected.limits[name]
    in_float32 = not case.final or name in ("lse", "dbias")
    dtype = torch.float32 if in_float32 else case.dtype
    assert got.dtype == dtype and got.shape == want.shape, f"{name}: {got.dtype}"
    if before is not None:
        want = want + before.double()
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: other rows without keys"
    last = max(UNIT[dtype], 4 * UNIT_FLOAT32) * want.abs() + SMALLEST_STEP[dtype]
    limit = (limit + last).expand_as(want)[finite] + 1e-30
    error = (got.double() - want).abs()[finite]
    worst = (error / limit).max().item() if error.numel() else 0.0
    assert worst <= 1.0, f"{name}: error {worst:.3g} times what rounding can do"
