"""Masks of ranges on the Triton templates, interpreted, on several ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from cpcompile.geometry.layout import Layout
from cpcompile.ops.step.template_steps import TemplateSteps
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked
from tests.support.attention_calls import attention
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.log_sum_exps import attend, step_of_lse, whole

RANGES = [
    "causal",
    "window",
    "both sides",
    "prefix",  # of each of the batch another one
    "left padding",
    "causal documents",
    "nothing",
]


@contextmanager
def launches(*names: str) -> Iterator[list[Mock]]:
    """Steps run on the templates; gives what counts these methods of TemplateSteps."""
    with config.patch(step_kernel="triton"), ExitStack() as stack:
        yield [
            stack.enter_context(
                mock.patch.object(
                    *(TemplateSteps, name),
                    autospec=True,
                    side_effect=getattr(TemplateSteps, name),
                )
            )
            for name in names
        ]


def run_and_count(case):
    """Results; of how many sources steps, their backward and gradients of a bias."""
    with launches("forward", "gradients", "add_bias_gradient") as counted:
        got = run_masked(case)
    forward, backward, of_bias = (x.call_count for x in counted)
    return got, (forward, backward // 2), of_bias  # dk and dv, and dq


def run_and_check(interpreters, case):
    results = interpreters[case.world].run(run_and_count, case, timeout=170.0)
    check_masked(case, results[0][0])
    return [calls for _, calls, _ in results]


@pytest.mark.parametrize("mask", RANGES)
def test_ring(interpreters, mask):
    calls = run_and_check(interpreters, MaskedCase(mask, seq=35, kv_heads=2))
    last = {"causal": 2, "nothing": 0}
    if mask in last:
        assert calls[1] == (last[mask], last[mask])
    assert all(forward == backward for forward, backward in calls)


@pytest.mark.parametrize("mask", ["window", "prefix"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_zigzag(interpreters, mask, strategy):
    """Keys of two runs, in one launch."""
    case = MaskedCase(mask, strategy, seq=35, layout=Layout.ZIGZAG)
    calls = run_and_check(interpreters, case)
    assert all(0 < forward <= 2 for forward, _ in calls)


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
@pytest.mark.parametrize("mask", ["causal documents", "left padding"])
def test_other_strategies(interpreters, mask, strategy):
    case = MaskedCase(mask, strategy, torch.float16, seq=35, kv_seq=40, kv_heads=1)
    assert run_and_check(interpreters, case) == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    "changes",
    [{"softcap": 1.0}, {"dropout_p": 0.3}, {"softcap": 1.0, "dropout_p": 0.3}],
    ids=["softcap", "dropout", "both"],
)
@pytest.mark.parametrize("mask", ["causal", "prefix", "none"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_softcap_and_dropout(interpreters, strategy, mask, changes):
    """Keys of two runs, of queries that are not a multiple of anything."""
    layout = Layout.CONTIGUOUS if mask == "none" else Layout.ZIGZAG
    case = MaskedCase(mask, strategy, seq=35, kv_heads=2, layout=layout, **changes)
    calls = run_and_check(interpreters, case)
    assert all(0 < forward == backward <= 2 for forward, backward in calls)


BOTH = {"softcap": 1.0, "dropout_p": 0.3}
OTHERS = ["falling", "holes", "interleaved", "bias", "bool of heads"]
OTHERS = [(mask, {}) for mask in OTHERS] + [(mask, BOTH) for mask in ("holes", "bias")]


def test_softcap_and_dropout_of_exchanged_heads(interpreters):
    """Each rank has other heads, and so other seeds."""
    case = MaskedCase("window", "ulysses", torch.float16, seq=35, **BOTH)
    assert run_and_check(interpreters, case) == [(1, 1), (1, 1)]


@pytest.mark.parametrize(("mask", "changes"), OTHERS)
def test_what_is_no_range_is_computed_in_parts(interpreters, mask, changes):
    case = MaskedCase(mask, seq=35, **changes)
    assert run_and_check(interpreters, case) == [(0, 0), (0, 0)]


TABLES = [
    MaskedCase("by key", seq=35, kv_heads=2),
    MaskedCase("by distance", seq=35, kv_seq=40, kv_heads=2),
    MaskedCase("by distance", seq=35, layout=Layout.ZIGZAG, world=3),
    MaskedCase("by key", "all_gather", seq=35, layout=Layout.ZIGZAG),
    MaskedCase("by distance", "all_gather", seq=35, layout=Layout.ZIGZAG),
    MaskedCase("by distance", "ulysses", torch.float16, seq=35, kv_seq=29),
    MaskedCase("low distances", seq=35),
    MaskedCase("low distances", "all_gather", torch.float16, seq=35),
    MaskedCase("by distance", seq=35, softcap=1.0, dropout_p=0.3),
    MaskedCase("by key", seq=35, softcap=1.0, dropout_p=0.3, layout=Layout.ZIGZAG),
    MaskedCase("by distance", seq=35, bias_grad=False),
    MaskedCase("distance of batch", seq=35),  # limits of each of the batch
]


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_bias_of_positions(interpreters, case):
    results = interpreters[case.world].run(run_and_count, case, timeout=170.0)
    check_masked(case, results[0][0])
    for _, (forward, backward), of_bias in results:
        assert 0 < forward == backward <= case.world
        assert of_bias == (backward if case.bias_grad else 0)


def run_decoding() -> tuple[Tensor, Tensor, Tensor]:
    """One query of 40 keys, of which a bias hides some, or is low for all of a head."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, m, 16) for n, m in ((4, 1), (2, 40), (2, 40)))
    bias = torch.randn(1, 4, 40)
    bias[:, 0] = -1e9  # whatever is added to it is lost
    bias[:, 2] -= 2000
    bias[:, 1, 3:30] = -torch.inf
    group = init_device_mesh("cpu", (1,)).get_group().group_name
    operands = (q, k, v, 1, 40, False, 0.3, group)
    with launches("forward") as (forward,):
        out, _ = attention("split_kv")(*operands, bias=bias)
    assert forward.call_count == 1
    found = []
    for dtype in (torch.float64, torch.float32):
        wide = [x.to(dtype).repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
        scores = wide[0] @ wide[1].mT * 0.3
        scores[:, 0] = 0
        scores = scores + bias.to(dtype)[:, :, None]
        found.append(scores.softmax(-1) @ wide[2])
    return out, found[0], found[1]


def test_decoding_with_a_bias_of_positions(interpreters):
    got, exact, rough = interpreters[1].run(run_decoding, timeout=170.0)[0]
    assert_close("out", got, exact, rough)


def run_log_sum_exp(strategy: str, kind: str) -> dict[str, Tensor]:
    group = init_device_mesh("cpu", (1,)).get_group().group_name

    def call(q, k, v, given):
        return attend(strategy, kind, group, q, k, v, given)

    with config.patch(step_kernel="triton"):
        return step_of_lse(kind, torch.float32, call)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("kind", ["causal", "key_ranges", "softcap", "sinks"])
def test_gradient_of_the_log_sum_exp(interpreters, kind, strategy):
    (got,) = interpreters[1].run(run_log_sum_exp, strategy, kind, timeout=170.0)
    exact, rough = (
        step_of_lse(kind, dtype, lambda *x: whole(kind, *x))
        for dtype in (torch.float64, torch.float32)
    )
    for name, x in exact.items():
        floor = OPERAND_SCALE if name.startswith("grad") else 0.0
        assert_close(name, got[name], x, rough[name], floor)
