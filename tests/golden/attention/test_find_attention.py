"""What is read of an attention call, however it is written, in one form."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, table
from tests.golden.operands import make_qkv
from tests.golden.rewritten_calls import check_equal, rewrite

sdpa = F.scaled_dot_product_attention


def found(captured):
    """The calls as text; the pass must have left the graph as it was."""
    step = captured["find_attention"]
    assert not step.changed
    calls = captured.ctx.findings.calls
    assert step.rewrites == len(calls)
    return "\n".join(
        f"{c.path}: q={c.q}, k={c.k}, v={c.v}, mask={c.mask}, dropout_p={c.dropout_p}, "
        f"is_causal={c.is_causal}, scale={c.scale:.4g}"
        + (f"\n  unsupported: {c.unsupported}" if c.unsupported else "")
        + (f"\n  left alone: {c.already_local}" if c.already_local else "")
        for c in calls
    )


def positional(q, k, v):
    return sdpa(q, k, v, None, 0.0, True)


def keywords(q, k, v):
    return sdpa(value=v, key=k, query=q, scale=0.5)


def overload(q, k, v):
    """inline_attention_modules leaves this spelling."""
    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)


def masked(q, k, v):
    return sdpa(q, k, v, attn_mask=torch.ones(16, 16, dtype=torch.bool))


def dropped(q, k, v):
    return sdpa(sdpa(q, k, v, dropout_p=0.1), k, v, dropout_p=1.0)


CALLS = (positional, keywords, overload, masked, dropped)


def test_calls(mesh):
    """Of sharded inputs, too."""
    inputs, texts = make_qkv(2, 4, 16, 8), {}
    captures = {
        fn.__name__: capture(fn, *inputs, mesh=mesh, shard={"q": 2}, strict=False)
        for fn in CALLS
    }
    sharded = [cp.shard(x, mesh, 2) for x in inputs]
    captures["positional, sharded"] = capture(positional, *sharded)
    for name, captured in captures.items():
        texts[name] = found(captured).replace("<top level>: q=l_q_, k=l_k_, ", "")
    assert_golden(
        table(texts),
        """\
positional: v=l_v_, mask=None, dropout_p=0.0, is_causal=True, scale=0.3536
keywords: v=l_v_, mask=None, dropout_p=0.0, is_causal=False, scale=0.5
overload: v=l_v_, mask=None, dropout_p=0.0, is_causal=True, scale=0.3536
masked: v=l_v_, mask=None, dropout_p=0.0, is_causal=False, scale=0.3536
dropped:
  v=l_v_, mask=None, dropout_p=0.1, is_causal=False, scale=0.3536
  <top level>: q=scaled_dot_product_attention, k=l_k_, v=l_v_, mask=None, dropout_p=1.0,
      is_causal=False, scale=0.3536
    unsupported: got dropout_p=1.0; needed a probability in [0, 1)
positional, sharded: v=l_v_, mask=None, dropout_p=0.0, is_causal=True, scale=0.3536""",
    )


class Layer(nn.Module):
    def forward(self, x):
        return sdpa(x, x, x)


class TwoLayers(nn.Module):
    """The first one is recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        return self.layers[1](x)


def test_modules_and_checkpoints_give_paths(mesh):
    x = torch.randn(2, 4, 16, 8, requires_grad=True)
    captured = capture(TwoLayers(), x, mesh=mesh, shard={"x": 2})
    assert_golden(
        found(captured),
        """\
layers.0: q=l_x_, k=l_x_, v=l_x_, mask=None, dropout_p=0.0, is_causal=False,
    scale=0.3536
layers.1: q=x, k=x, v=x, mask=None, dropout_p=0.0, is_causal=False, scale=0.3536""",
    )


@pytest.mark.parametrize("first", [Replicate(), Shard(2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_heads_or_batch_sharded(mesh_2d, first, dim):
    """Only where a sequence is split as well the call is to be rewritten."""
    inputs = [
        distribute_tensor(x, mesh_2d, [first, Shard(dim)])
        for x in make_qkv(4, 4, 16, 8)
    ]
    captured = capture(lambda q, k, v: sdpa(q, k, v), *inputs)
    (call,) = captured.ctx.findings.calls
    is_split = first == Shard(2)
    placed = ", ".join([f"R,S({dim})"] * 3)
    text = f"q, k, v have placements {placed}, and none is split on the sequence"
    assert call.already_local == (None if is_split else text)
    assert captured["choose_strategy"].rewrites == is_split


@pytest.mark.parametrize("key_heads, value_heads", [(4, 2), (2, 4)])
def test_heads_of_keys_and_values_that_differ(mesh, key_heads, value_heads):
    """With enable_gqa torch repeats each as often as it needs."""

    def grouped(q, k, v):
        return sdpa(q, k, v, enable_gqa=True)

    shapes = [(2, heads, 16, 8) for heads in (8, key_heads, value_heads)]
    captured = capture(
        grouped, *map(torch.randn, shapes), mesh=mesh, shard={"q": 2}, strict=False
    )
    (call,) = captured.ctx.findings.calls
    q, k, v = (list(shape) for shape in shapes)
    assert call.unsupported == (
        f"got q {q}, k {k}, v {v}; needed equal batches, and k and v alike: expand them"
    )
    assert captured["choose_strategy"].rewrites == 0


# q, k, v without their last two sizes -> batch, query heads and key heads of operators
ALIGNED = {
    "five dims, one key head": ((2, 3, 4), (2, 3, 1), (2, 3, 1), (6, 4, 1)),
    "five and four dims": ((2, 3, 4), (3, 4), (3, 4), (6, 4, 4)),
    "one batch of queries": ((1, 4), (2, 4), (2, 4), (2, 4, 4)),
    "one head of queries": ((2, 1), (2, 4), (2, 4), (2, 4, 4)),
    "one head of values": ((2, 4), (2, 4), (2, 1), (2, 4, 4)),
    "three dims, one batch of keys": ((4,), (1,), (1,), (1, 4, 1)),
    "three and two dims": ((4,), (), (), (1, 4, 1)),
    "four dims": ((2, 4), (2, 1), (2, 1), (2, 4, 1)),
}


@pytest.mark.parametrize("case", ALIGNED)
@pytest.mark.parametrize("mask", [None, (7, 5), (1, 1, 1, 7, 5)], ids=str)
def test_operands_of_any_number_of_dimensions(case, mask):
    *leading, (batch, heads, kv_heads) = ALIGNED[case]
    sizes = ((7, 4), (5, 4), (5, 3))
    shapes = [(*x, *size) for x, size in zip(leading, sizes, strict=True)]
    most = max(map(len, shapes))
    shapes += [mask[-most:]] if mask else []
    inputs = [torch.randn(x, dtype=torch.float64).requires_grad_() for x in shapes]
    got = rewrite(lambda *x: sdpa(*x, scale=0.7) * 2.0, *inputs)
    (call,) = got.calls
    assert call.unsupported is None and call.q_shape == (batch, heads, 7, 4)
    assert call.k_shape == (batch, kv_heads, 5, 4)
    check_equal(got, lambda *x: sdpa(*x, scale=0.7) * 2.0, *inputs)
