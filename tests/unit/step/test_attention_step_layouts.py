"""The steps of all ranks, one after the other, are causal attention in any layout."""

import sys
from types import SimpleNamespace

import pytest
import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.visibility import visible_tokens
from cpcompile.ops.step.row_mask import RowMask
from cpcompile.ops.step.step_arguments import ChunkLimits
from tests.support.pairwise import in_pairs
from tests.unit.step.step_cases import (
    SCALE,
    Inputs,
    assert_close,
    attend,
    gradients,
    plain,
)

KERNELS = ["aten_flash", "aten_math"]
PADDING = 100.0  # what padded keys and values are filled with; nobody may see it

attention_step = torch.ops.cp.attention_step.default
attention_step_backward = torch.ops.cp.attention_step_backward.default


def held_by(tokens, rank, *tensors):
    """The tokens of a rank."""
    return [x[:, :, tokens.positions(rank)] for x in tensors]


def chunk_of(tokens, rank, *tensors):
    """The same, padded as it travels."""
    pad = (0, 0, 0, tokens.size - tokens.count(rank))
    parts = held_by(tokens, rank, *tensors)
    return [torch.nn.functional.pad(x, pad, value=PADDING) for x in parts]


def told(tokens, rank, source):
    """What a step is told of the chunk of a source."""
    return ChunkLimits(SCALE, visible_tokens(tokens, rank, source)).arguments()


def forward(tokens, rank, inputs, kernel):
    """out and lse of the rank's queries, after a step per source."""
    (q,), state = held_by(tokens, rank, inputs.q), (None, None)
    for step in range(tokens.ranks):
        source = (rank - step) % tokens.ranks
        k, v = chunk_of(tokens, source, inputs.k, inputs.v)
        arguments = told(tokens, rank, source)
        final = step + 1 == tokens.ranks
        state = attention_step(q, k, v, *state, *arguments, final, kernel)
    return state


def backward(tokens, rank, inputs, state, kernel):
    """dq of the rank, and its share of the whole dk and dv."""
    grad, q = held_by(tokens, rank, inputs.grad, inputs.q)
    dq, dk, dv = None, torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
    for step in range(tokens.ranks):
        source = (rank - step) % tokens.ranks
        k, v = chunk_of(tokens, source, inputs.k, inputs.v)
        saved, how = (grad, q, k, v, *state, dq), (False, False, kernel)
        arguments = told(tokens, rank, source)
        dq, *parts, dbias = attention_step_backward(*saved, *arguments, *how)
        assert not dbias.numel()
        count = tokens.count(source)
        for whole, part in zip((dk, dv), parts, strict=True):
            whole[:, :, tokens.positions(source)] = part[:, :, :count]
            assert not part[:, :, count:].any()
    return dq, dk, dv


@in_pairs(
    {
        "length, ranks": [(24, 3), (21, 3), (22, 4), (10, 4), (3, 4), (70, 2), (5, 1)],
        "layout": tuple(Layout),
        "dtype": [torch.float32, torch.float64],
        "kernel": KERNELS,
    }
)
def test_a_ring_is_one_attention(layout, length, ranks, dtype, kernel):
    check_ring(TokenLayout.of(layout, length, ranks), dtype, kernel)


def check_ring(tokens, dtype, kernel):
    length, ranks = tokens.length, range(tokens.ranks)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    inputs = Inputs.random(dtype, 2, (8, 6), mask, mask[:, :0])
    states = [forward(tokens, rank, inputs, kernel) for rank in ranks]
    grads = [
        backward(tokens, rank, inputs, state, kernel)
        for rank, state in enumerate(states)
    ]
    dq, dk, dv = zip(*grads, strict=True)
    inverse = tokens.inverse()
    out = torch.cat([out for out, _ in states], 2)[:, :, inverse]
    got = (out, torch.cat(dq, 2)[:, :, inverse], sum(dk), sum(dv))
    exact = (attend(inputs.q, inputs.k, inputs.v, mask)[0], *gradients(inputs, False))
    one_call = plain(inputs)
    for name, x, expected in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
        assert_close(name, x, expected, expected, getattr(one_call, name))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", [24, 22])
def test_no_layout_needs_a_mask(layout, length, monkeypatch):
    """aten's kernels compute every step; nothing holds all scores."""

    def refuse(*_):
        raise AssertionError("a mask of all rows and keys")

    monkeypatch.setattr(ChunkLimits, "row_mask", refuse)
    monkeypatch.setattr(RowMask, "of_block", refuse)
    check_ring(TokenLayout.of(layout, length, 4), torch.float32, "aten_flash")


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.FOLD])
def test_aten_gets_a_contiguous_lse(layout, monkeypatch):
    """Of half of the rows; its backward on CUDA reads it without its strides."""
    module = sys.modules["cpcompile.ops.step.aten_flash"]
    forward, backward = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    given = []

    def record(*args, **kwargs):
        given.append(args[5])
        return backward(*args, **kwargs)

    kernels = SimpleNamespace(
        _scaled_dot_product_flash_attention_for_cpu=forward,
        _scaled_dot_product_flash_attention_for_cpu_backward=record,
    )
    monkeypatch.setattr(module, "aten", kernels)
    check_ring(TokenLayout.of(layout, 24, 2), torch.float32, "aten_flash")
    assert any(lse.shape[2] < 12 for lse in given)
    assert all(lse.is_contiguous() for lse in given)
