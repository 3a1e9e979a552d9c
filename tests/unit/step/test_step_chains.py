"""Steps over all chunks of all ranks are one attention, forward and backward.

A ring without a network: every rank's steps run here, one rank after the other, in the
order in which the chunks would arrive. References and tolerances are those of
Note [Derived tolerances].
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.visibility import Visible, visible_chunk
from cpcompile.ops.step.block_attention import row_dots
from cpcompile.ops.step.step_arguments import ChunkLimits
from tests.cpu.attention_cases import Attended, AttentionCase, check, make_inputs
from tests.support.pairwise import selected_cases

ops = torch.ops.cp


@dataclass(frozen=True)
class Step:
    """One chunk of keys and values, where it lies, and what the rank sees of it."""

    start: int
    k: Tensor
    v: Tensor
    visible: Visible
    last: bool


def steps_of(case, rank, ranks, k, v):
    queries, keys = Chunks(case.seq, ranks), Chunks(k.shape[2], ranks)
    for number in range(ranks):
        source = (rank - number) % ranks
        start, count = keys.start(source), keys.count(source)
        visible = visible_chunk(
            queries.start(rank),
            queries.count(rank),
            start,
            count,
            count,
            case.causal,
        )
        chunk = (x.narrow(2, start, count) for x in (k, v))
        yield Step(start, *chunk, visible, number + 1 == ranks)


def forward(steps, q, scale, kernel):
    state = (None, None)
    for step in steps:
        told = ChunkLimits(scale, step.visible).arguments()
        operands = (q, step.k, step.v, *state)
        state = ops.attention_step(*operands, *told, step.last, kernel)
    return state


def split_backward(steps, grad, q, out, lse, dk, dv, scale, kernel):
    """dq; dk and dv are added to."""
    dq, delta = None, row_dots(grad, out)
    for step in steps:
        operands = (grad, q, step.k, step.v, lse, delta)
        totals = [x.narrow(2, step.start, step.k.shape[2]) for x in (dk, dv)]
        rest = ChunkLimits(scale, step.visible).arguments()
        sums = ops.attention_step_dkdv(*operands, *totals, *rest, False, kernel)
        for total, x in zip(totals, sums, strict=True):
            total.copy_(x)
        dq = ops.attention_step_dq(*operands, dq, *rest, step.last, kernel)
    return dq


def joint_backward(steps, grad, q, out, lse, dk, dv, scale, kernel):
    """dq; dk and dv are added to."""
    dq = None
    for step in steps:
        told = ChunkLimits(scale, step.visible).arguments()
        saved = (grad, q, step.k, step.v, out, lse, dq)
        dq, *parts, _ = ops.attention_step_backward(
            *saved, *told, False, step.last, kernel
        )
        for total, part in zip((dk, dv), parts, strict=True):
            total.narrow(2, step.start, step.k.shape[2]).add_(part)
    return dq


BACKWARD = {"split": split_backward, "joint": joint_backward}


def check_ring(case, kernel, form):
    inputs = make_inputs(case)
    ranks, scale = case.world, case.head_dim**-0.5
    _, k, v, _ = inputs
    accumulation = torch.float64 if case.dtype == torch.float64 else torch.float32
    dk, dv = (torch.zeros_like(x, dtype=accumulation) for x in (k, v))
    outs, dqs = [], []
    queries = Chunks(case.seq, ranks)
    for rank in range(ranks):
        part = queries.start(rank), queries.count(rank)
        q, grad = (x.narrow(2, *part) for x in (inputs[0], inputs[3]))
        steps = list(steps_of(case, rank, ranks, k, v))
        out, lse = forward(steps, q, scale, kernel)
        outs.append(out)
        dqs.append(BACKWARD[form](steps, grad, q, out, lse, dk, dv, scale, kernel))
    got = (torch.cat(outs, 2), torch.cat(dqs, 2), dk.to(case.dtype), dv.to(case.dtype))
    check(inputs, case.causal, None, Attended(*got))


AXES = {
    "kernel": ("aten_flash", "aten_math"),
    "form": tuple(BACKWARD),
    "causal": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "kv_heads": (4, 2, 1),
    "world": (1, 2, 3, 4),
    "seq": (64, 67, 5),
    "kv_seq": (None, 30, 90),
    "value_dim": (16, 9, 24),
}


@pytest.mark.parametrize(
    "values",
    selected_cases(AXES),
    ids=lambda values: "-".join(str(v).replace("torch.", "") for v in values.values()),
)
def test_forward_and_gradients(values):
    rest = {k: v for k, v in values.items() if k not in ("kernel", "form")}
    check_ring(AttentionCase(**rest), values["kernel"], values["form"])


@settings(deadline=None)
@given(
    st.sampled_from(AXES["kernel"]),
    st.sampled_from(AXES["form"]),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_any_lengths(kernel, form, causal, seq, kv_seq, ranks):
    """Also fewer tokens than ranks, which leaves the last ones without any."""
    case = AttentionCase(
        "ring", "operator", causal, 2, torch.float64, ranks, seq, kv_seq
    )
    check_ring(case, kernel, form)
