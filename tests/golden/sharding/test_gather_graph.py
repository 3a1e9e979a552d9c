"""The fallback: inputs are gathered, and every rank computes all of the graph."""

from torch.distributed.tensor import Replicate

import cpcompile as cp
from cpcompile.passes.model.sharding.gather_graph import gather_graph
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, lines_without
from tests.golden.operands import QKV, make_qkv, sdpa


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def test_sharded_inputs(mesh):
    """Calls see full tensors, and the result is a DTensor that every rank has whole."""
    inputs = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    captured = capture(attend, *inputs, passes=[gather_graph])
    step = captured["gather_graph"]
    assert step.rewrites == 3
    assert "= scaled_dot_product_attention(l_q_, l_k_, l_v_, is_causal" in step.before
    assert_golden(
        lines_without(captured.text, "= input", "(l_k_", "(l_v_", "(cp_from_local_"),
        """\
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
    (line,) = captured.lines("= cp_gather").splitlines()
    assert "= cp_gather_tokens(cp_from_local, 16, 'zigzag')" in line


def test_plain_inputs_stay(mesh):
    """The twin: they are full already, and so is the result."""
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(attend, *inputs, mesh=mesh, shard=QKV, passes=[gather_graph])
    assert captured["gather_graph"].rewrites == 0
    assert not captured["gather_graph"].changed
    assert captured.ctx.findings.outputs == [None]
