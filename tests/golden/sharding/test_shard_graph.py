"""Inputs and results of the sharded graph, and of the fallback, which gathers all."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.passes.model.sharding.gather_graph import gather_graph
from tests.golden.capture import capture, capture_pass
from tests.golden.golden_text import assert_golden, lines_without, table
from tests.golden.operands import QKV, causal, make_qkv, sdpa


def test_plain_inputs(mesh):
    """Without `shard`, the operands of attention say what is a sequence."""
    inputs = make_qkv(2, 4, 16, 8)
    step = capture_pass("shard_graph", causal, *inputs, mesh=mesh, shard=QKV)
    assert step.rewrites == 2
    assert_golden(
        f"{step.before}\n  ->\n{step.after}",
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)
  ->
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
cp_shard = cp_shard(l_q_, 2)  # [2, 4, 16, 8] S(2)
cp_shard_1 = cp_shard(l_k_, 2)  # [2, 4, 16, 8] S(2)
cp_shard_2 = cp_shard(l_v_, 2)  # [2, 4, 16, 8] S(2)
ring_attention_default = cp.ring_attention(cp_shard, cp_shard_1, cp_shard_2,
    sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8] S(2)
cp_gather = cp_gather(getitem)  # [2, 4, 16, 8]
return (cp_gather,)""",
    )
    assert capture_pass("shard_graph", causal, *inputs, mesh=mesh).after == step.after


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_sharded_inputs(mesh, strategy):
    sharded = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    captured = capture(causal, *sharded, strategy=strategy)
    assert captured["shard_graph"].rewrites == 2
    assert_golden(
        captured.text.replace(strategy, "STRATEGY"),
        """\
l_q_ = input  # [2, 4, 2, 8]
l_k_ = input  # [2, 4, 2, 8]
l_v_ = input  # [2, 4, 2, 8]
cp_from_local = cp_from_local(l_q_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_from_local_1 = cp_from_local(l_k_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
cp_from_local_2 = cp_from_local(l_v_, (S(2),), (2, 4, 16, 8),
    (512, 128, 8, 1))  # [2, 4, 16, 8] S(2)
STRATEGY_attention_default = cp.STRATEGY_attention(cp_from_local, cp_from_local_1,
    cp_from_local_2, sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
getitem = STRATEGY_attention_default[0]  # [2, 4, 16, 8] S(2)
cp_to_local = cp_to_local(getitem, (S(2),))  # [2, 4, 2, 8]
return (cp_to_local,)""",
    )


def test_other_meshes_shapes_and_lengths(mesh_2d):
    """Other axes keep their placements; 15 tokens on 4 ranks are 4 each, and 3.

    Plain inputs say nothing of dp, so the graph knows only cp.
    """
    batch = [
        distribute_tensor(x, mesh_2d, [Shard(0), Shard(2)])
        for x in make_qkv(4, 4, 16, 8)
    ]
    uneven = [cp.shard(x, mesh_2d, 2) for x in make_qkv(2, 4, 15, 8)]
    plain = capture(causal, *make_qkv(2, 4, 16, 8), mesh=mesh_2d, shard=QKV)
    assert plain.ctx.mesh.mesh_dim_names == ("cp",)
    assert plain.ctx.ranks == 4
    assert plain.text.count("= cp_shard(l_") == 3
    three_dims = {"mesh": mesh_2d, "shard": {"q": 1, "k": 1, "v": 1}}
    captures = {
        "batch and sequence": capture(causal, *batch),
        "uneven": capture(causal, *uneven),
        "three dimensions": capture(causal, *make_qkv(4, 16, 8), **three_dims),
    }
    assert captures["three dimensions"]["shard_graph"].rewrites == 6
    words = ("(l_q_", "= unsqueeze(", "ring_attention", "= cp_to_local", "= cp_gather")
    texts = {
        name: lines_without(x.lines(*words), "l_k_", "l_v_", "unsqueeze_1 =")
        for name, x in captures.items()
    }
    assert_golden(
        table(texts),
        """\
batch and sequence:
  cp_from_local = cp_from_local(l_q_, (S(0), S(2)), (4, 4, 16, 8),
      (512, 128, 8, 1))  # [4, 4, 16, 8] S(0),S(2)
  ring_attention_default = cp.ring_attention(cp_from_local, cp_from_local_1,
      cp_from_local_2, sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
  getitem = ring_attention_default[0]  # [4, 4, 16, 8] S(0),S(2)
  cp_to_local = cp_to_local(getitem, (S(0), S(2)))  # [2, 4, 4, 8]
uneven:
  cp_from_local = cp_from_local(l_q_, (R, S(2)), (2, 4, 15, 8),
      (480, 120, 8, 1))  # [2, 4, 15, 8] R,S(2)
  ring_attention_default = cp.ring_attention(cp_from_local, cp_from_local_1,
      cp_from_local_2, sizes=[15, 15], spec='causal scale=0.353553', group=GROUP)
  getitem = ring_attention_default[0]  # [2, 4, 15, 8] R,S(2)
  cp_to_local = cp_to_local(getitem, (R, S(2)))  # [2, 4, 4, 8]
three dimensions:
  cp_shard = cp_shard(l_q_, 1)  # [4, 16, 8] S(1)
  unsqueeze = unsqueeze(cp_shard, 1)  # [4, 1, 16, 8] S(2)
  unsqueeze_2 = unsqueeze(cp_shard_2, 1)  # [4, 1, 16, 8] S(2)
  ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
      sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
  getitem = ring_attention_default[0]  # [4, 1, 16, 8] S(2)
  cp_gather = cp_gather(squeeze)  # [4, 16, 8]""",
    )


class Layer(nn.Module):
    """Token ids to attention: [B, S] -> [B, S, C]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        return sdpa(q, k, v).transpose(1, 2).flatten(2)


def test_parameters_and_token_ids(mesh):
    """Ids are plain up to the embedding; parameters are replicated."""
    ids = torch.randint(32, (2, 16))
    captured = capture(Layer(), ids, mesh=mesh, shard={"ids": 1})
    assert_golden(
        captured.text,
        """\
l_self_modules_embedding_parameters_weight_ = input  # [32, 8]
l_ids_ = input  # [2, 16]
l_self_modules_qkv_parameters_weight_ = input  # [24, 8]
cp_replicate = cp_replicate(l_self_modules_embedding_parameters_weight_)  # [32, 8] R
cp_replicate_1 = cp_replicate(l_self_modules_qkv_parameters_weight_)  # [24, 8] R
cp_shard = cp_shard(l_ids_, 1)  # [2, 16] S(1)
x = embedding(cp_shard, cp_replicate, None, None, 2, False, False)  # [2, 16, 8] S(1)
linear = linear(x, cp_replicate_1, None)  # [2, 16, 24] S(1)
unflatten = .unflatten(linear, -1, (6, 4))  # [2, 16, 6, 4] S(1)
transpose = .transpose(unflatten, 1, 2)  # [2, 6, 16, 4] S(2)
chunk = .chunk(transpose, 3, 1)
q = chunk[0]  # [2, 2, 16, 4] S(2)
k = chunk[1]  # [2, 2, 16, 4] S(2)
v = chunk[2]  # [2, 2, 16, 4] S(2)
ring_attention_default = cp.ring_attention(q, k, v, sizes=[16, 16], spec='scale=0.5',
    group=GROUP)
getitem_3 = ring_attention_default[0]  # [2, 2, 16, 4] S(2)
transpose_1 = .transpose(getitem_3, 1, 2)  # [2, 16, 2, 4] S(1)
flatten = .flatten(transpose_1, 2)  # [2, 16, 8] S(1)
cp_gather = cp_gather(flatten)  # [2, 16, 8]
return (cp_gather,)""",
    )


def test_token_ids_that_are_sharded(mesh):
    ids = cp.shard(torch.randint(32, (2, 16)), mesh, 1)
    captured = capture(Layer(), ids)
    assert_golden(
        captured.lines("l_ids_, ", "= embedding(", "to_local"),
        """\
cp_from_local = cp_from_local(l_ids_, (S(1),), (2, 16), (16, 1))  # [2, 16] S(1)
x = embedding(cp_from_local, cp_replicate, None, None, 2, False,
    False)  # [2, 16, 8] S(1)
cp_to_local = cp_to_local(flatten, (S(1),))  # [2, 2, 8]
return (cp_to_local,)""",
    )


def test_gradients_that_someone_else_sums(mesh):
    ids = torch.randint(32, (2, 16))
    captured = capture(Layer(), ids, mesh=mesh, shard={"ids": 1}, grad_sync="none")
    assert captured.text.count("unreduced(l_self_") == 2
    assert captured.text.count("= cp_replicate(") == 0


def test_checkpoint_region(mesh):
    def recomputed(q, k, v):
        return checkpoint(causal, q, k, v, use_reentrant=False)

    inputs = [x.requires_grad_() for x in make_qkv(2, 4, 16, 8)]
    text = capture(recomputed, *inputs, mesh=mesh, shard=QKV).text
    assert_golden(
        text[text.index("wrap_body_0 =") :],
        """\
wrap_body_0 = get_attr wrap_body_0
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, cp_shard, cp_shard_1,
    cp_shard_2, use_reentrant=False)
    l_q_ = input  # [2, 4, 16, 8] S(2)
    l_k_ = input  # [2, 4, 16, 8] S(2)
    l_v_ = input  # [2, 4, 16, 8] S(2)
    ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
        spec='causal scale=0.353553', group=GROUP)
    getitem = ring_attention_default[0]  # [2, 4, 16, 8] S(2)
    return (getitem,)
getitem = tag_activation_checkpoint[0]  # [2, 4, 16, 8] S(2)
cp_gather = cp_gather(getitem)  # [2, 4, 16, 8]
return (cp_gather,)""",
    )


def test_nothing_to_shard(mesh):
    """No attention and no input that is to be sharded: nothing is written."""
    captured = capture(lambda x: x.relu().sum(), torch.randn(2, 16), mesh=mesh)
    step = captured["shard_graph"]
    assert step.rewrites == 0
    assert not step.changed
    assert captured.ctx.findings.outputs == [None]


def test_outputs_that_stay_sharded(mesh):
    """The local part leaves the graph; the backend makes it a DTensor again."""
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(
        causal, *inputs, mesh=mesh, shard=QKV, gather_outputs_megabytes=0
    )
    assert_golden(
        captured.lines("cp_to_local", "cp_gather"),
        """\
cp_to_local = cp_to_local(getitem, (S(2),))  # [2, 4, 2, 8]
return (cp_to_local,)""",
    )
    (placement,) = captured.ctx.findings.outputs
    assert placement is not None
    assert placement.placements == (Shard(2),)
    assert placement.shape == (2, 4, 16, 8)
    assert captured.ctx.findings.gathered_results == []


def test_outputs_that_are_gathered(mesh):
    captured = capture(causal, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV)
    assert captured.ctx.findings.outputs == [None]
    assert captured.ctx.findings.gathered_results == ["getitem [2, 4, 16, 8]"]


def test_plain_outputs_are_neither(mesh):
    def with_positions(q, k, v):
        return causal(q, k, v), torch.arange(16)

    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(
        with_positions, *inputs, mesh=mesh, shard=QKV, gather_outputs_megabytes=0
    )
    assert captured.text.endswith("return (cp_to_local, arange)")
    assert captured.ctx.findings.outputs[1] is None


def test_sharded_inputs_are_gathered(mesh):
    """Calls see full tensors, and the result is a DTensor that every rank has whole."""
    inputs = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    captured = capture(causal, *inputs, passes=[gather_graph])
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
        lambda x: causal(x, x, x), x, layout="auto", passes=[gather_graph]
    )
    (line,) = captured.lines("= cp_gather").splitlines()
    assert "= cp_gather_tokens(cp_from_local, 16, 'zigzag')" in line


def test_plain_inputs_stay(mesh):
    """The twin: they are full already, and so is the result."""
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(causal, *inputs, mesh=mesh, shard=QKV, passes=[gather_graph])
    assert captured["gather_graph"].rewrites == 0
    assert not captured["gather_graph"].changed
    assert captured.ctx.findings.outputs == [None]
