"""The log-sum-exp that operators return has the gradient that autograd computes."""

import pytest
import torch

from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.log_sum_exps import (
    KINDS,
    attend,
    step_of_lse,
    whole,
)
from tests.unit.ops.operands import make_operands

OPERATORS = ("ring", "all_gather")  # with a backward of their own
GROUPED = (*OPERATORS, "ulysses", "hybrid")
CASES = [(strategy, kind) for strategy in GROUPED for kind in KINDS]
CASES += [("local", kind) for kind in KINDS[1:]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_against_autograd(one_rank, strategy, kind, dtype):
    got = step_of_lse(
        kind, dtype, lambda *x: attend(strategy, kind, one_rank, *x[:3], given=x[3])
    )
    exact, rough = (
        step_of_lse(kind, t, lambda *x: whole(kind, *x)) for t in (torch.float64, dtype)
    )
    for name, x in exact.items():
        floor = OPERAND_SCALE if name.startswith("grad") else 0.0
        other = None if dtype == torch.float64 else rough[name]
        assert_close(name, got[name], x, other, floor)


@pytest.mark.parametrize("strategy", GROUPED)
def test_of_the_log_sum_exp_alone(one_rank, strategy):
    """Nothing reads the attention itself, or nothing the log-sum-exp."""
    q, k, v = (x.requires_grad_() for x in make_operands(torch.float64, 4))
    out, lse = attend(strategy, "causal", one_rank, q, k, v, {})
    exact = whole("causal", q, k, v, {})
    for mine, other in zip((out, lse), exact, strict=True):
        for x in (q, k, v):
            got, wanted = (
                torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)[0]
                for y in (mine, other)
            )
            wanted = torch.zeros_like(x) if wanted is None else wanted
            assert_close("gradient", got, wanted, floor=OPERAND_SCALE)
