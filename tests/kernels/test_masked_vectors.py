"""Masks of ranges on the Triton templates, interpreted, on several ranks."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from cpcompile.ops.steps import masked_vectors
from cpcompile.plans import Layout
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked
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
OTHERS = ["falling", "holes", "interleaved", "bias", "bool of heads"]


def run_on_templates(case):
    """The results, and how many sources were computed by the step kernels."""
    steps = masked_vectors.VectorSteps
    with (
        config.patch(step_kernel="triton"),
        mock.patch.object(
            steps, "forward", autospec=True, side_effect=steps.forward
        ) as f,
        mock.patch.object(
            steps, "backward", autospec=True, side_effect=steps.backward
        ) as b,
    ):
        got = run_masked(case)
    return got, (f.call_count, b.call_count)


def run_and_check(interpreters, case):
    results = interpreters[case.world].run(run_on_templates, case, timeout=170.0)
    check_masked(case, results[0][0])
    return [calls for _, calls in results]


@pytest.mark.core("window", "causal documents", "nothing")
@pytest.mark.parametrize("mask", RANGES)
def test_ring(interpreters, mask):
    calls = run_and_check(interpreters, MaskedCase(mask, seq=35, kv_heads=2))
    last = {"causal": 2, "nothing": 0}
    if mask in last:
        assert calls[1] == (last[mask], last[mask])
    assert all(forward == backward for forward, backward in calls)


@pytest.mark.core("all_gather-window")
@pytest.mark.parametrize("mask", ["window", "prefix"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_zigzag(interpreters, mask, strategy):
    """Keys of two runs, in one launch."""
    case = MaskedCase(mask, strategy, seq=35, layout=Layout.ZIGZAG)
    calls = run_and_check(interpreters, case)
    assert all(0 < forward <= 2 for forward, _ in calls)


@pytest.mark.core("causal documents-ulysses")
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
@pytest.mark.parametrize("mask", ["causal documents", "left padding"])
def test_other_strategies(interpreters, mask, strategy):
    case = MaskedCase(mask, strategy, torch.float16, seq=35, kv_seq=40, kv_heads=1)
    assert run_and_check(interpreters, case) == [(1, 1), (1, 1)]


@pytest.mark.core("ring-causal-both")
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


def test_softcap_and_dropout_of_exchanged_heads(interpreters):
    """Each rank has other heads, and so other seeds."""
    changes = {"softcap": 1.0, "dropout_p": 0.3}
    case = MaskedCase("window", "ulysses", torch.float16, seq=35, **changes)
    assert run_and_check(interpreters, case) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("mask", ["holes", "bias"])
def test_softcap_and_dropout_of_what_is_no_range(interpreters, mask):
    case = MaskedCase(mask, seq=35, softcap=1.0, dropout_p=0.3)
    assert run_and_check(interpreters, case) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("mask", OTHERS)
def test_what_is_no_range_is_computed_in_parts(interpreters, mask):
    case = MaskedCase(mask, seq=35)
    assert run_and_check(interpreters, case) == [(0, 0), (0, 0)]


def run_log_sum_exp(strategy: str, kind: str) -> dict[str, Tensor]:
    group = init_device_mesh("cpu", (1,)).get_group().group_name

    def call(q, k, v, given):
        return attend(strategy, kind, group, q, k, v, given)

    with config.patch(step_kernel="triton"):
        return step_of_lse(kind, torch.float32, call)


@pytest.mark.core("softcap-all_gather")
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
