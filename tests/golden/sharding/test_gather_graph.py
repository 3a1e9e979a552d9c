"""The fallback: inputs are gathered, and every rank computes all of the graph."""

from torch.distributed.tensor import Replicate

import cpcompile as cp
from cpcompile.passes.model.sharding.gather_graph import gather_graph
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV, make_qkv, sdpa


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def test_sharded_inputs(mesh):
    """Calls see full tensors, and the result is a DTensor that every rank has whole."""
    inputs = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    captured = capture(attend, *inputs, passes=[gather_graph])
    step = captured["gather_graph"]
    assert step.rewrites == 3
    assert_golden(
        step.before,
        """\
l_q_ = input  # [2, 4, 16, 8] S(2)
l_k_ = input  # [2, 4, 16, 8] S(2)
l_v_ = input  # [2, 4, 16, 8] S(2)
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_,
    is_causal=True)  # [2, 4, 16, 8] S(2)
return (scaled_dot_product_attention,)""",
    )
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 2, 8]
l_k_ = input  # [2, 4, 2, 8]
l_v_ = input  # [2, 4, 2, 8]
cp_from_local_2 = cp_from_local(l_v_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_gather_2 = cp_gather(cp_from_local_2)  # [2, 4, 16, 8]
cp_from_local_1 = cp_from_local(l_k_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_gather_1 = cp_gather(cp_from_local_1)  # [2, 4, 16, 8]
cp_from_local = cp_from_local(l_q_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_gather = cp_gather(cp_from_local)  # [2, 4, 16, 8]
scaled_dot_product_attention = scaled_dot_product_attention(cp_gather, cp_gather_1,
    cp_gather_2, is_causal=True)  # [2, 4, 16, 8] S(2)
return (scaled_dot_product_attention,)""",
    )
    (result,) = captured.ctx.findings.outputs
    assert result.placements == (Replicate(),) and result.shape == (2, 4, 16, 8)


def test_inputs_in_a_layout(mesh):
    """Their tokens are brought into natural order."""
    x, _, _ = make_qkv(2, 4, 16, 8)
    x = cp.shard(x, mesh, 2, layout="zigzag")
    captured = capture(
        lambda x: attend(x, x, x), x, layout="auto", passes=[gather_graph]
    )
    assert_golden(
        captured.lines("cp_", "scaled"),
        """\
cp_from_local = cp_from_local(l_x_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_gather = cp_gather_tokens(cp_from_local, 16, 'zigzag')  # [2, 4, 16, 8]
scaled_dot_product_attention = scaled_dot_product_attention(cp_gather, cp_gather,
    cp_gather, is_causal=True)  # [2, 4, 16, 8] S(2)
return (scaled_dot_product_attention,)""",
    )


def test_plain_inputs_stay(mesh):
    """The twin: they are full already, and so is the result."""
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(attend, *inputs, mesh=mesh, shard=QKV, passes=[gather_graph])
    assert captured["gather_graph"].rewrites == 0
    assert not captured["gather_graph"].changed
    assert captured.ctx.findings.outputs == [None]
