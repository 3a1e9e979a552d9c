"""Runs the kernels of a step in the interpreter, and compares them with step_cases."""

import torch
from torch import Tensor

from tests.kernels.interpreter import Interpreter
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


def run_and_check(interpreter: Interpreter, case: StepCase) -> None:
    torch.manual_seed(0)
    D, E = case.head_dim, case.value_dim or case.head_dim
    q = operand(case, case.heads, case.rows, D)
    k = operand(case, case.kv_heads, case.keys, D)
    v = operand(case, case.kv_heads, case.keys, E)
    grad = operand(case, case.heads, case.rows, E)
    expected = reference(case, grad, q, k, v)
    limits = (vector(case.upper, case.rows), vector(case.lower, case.rows))
    rest = (*limits, case.visible, case.scale, case.final)
    more = {"changes": changes(case), "config": case.config}
    dk_in, dv_in, dq_in = (torch.randn(x.shape) for x in (k, v, q))
    add = case.accumulate

    state = (expected.out_in, expected.lse_in) if add else (None, None)
    out, lse = interpreter.call("forward", q, k, v, *state, *rest, **more)
    check("out", out, expected, case, None)
    check("lse", lse, expected, case, None)

    shared = (grad, q, k, v, expected.lse, expected.delta)
    grads = (dk_in, dv_in) if add else (None, None)
    dk, dv = interpreter.call("dkdv", *shared, *grads, *rest, **more)
    check("dk", dk, expected, case, grads[0])
    check("dv", dv, expected, case, grads[1])

    before = dq_in if add else None
    dq = interpreter.call("dq", *shared, before, *rest, **more)
    check("dq", dq, expected, case, before)

    if more["changes"].biasing is None:
        return
    if case.visible.rows is case.visible.keys is None and "of spans" not in case.bias:
        more["config"] = case.square
        found = interpreter.call("dbias", *shared, *rest[:-1], **more)
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
