"""Attention calls for which no operator is inserted."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.golden.capture import capture_pass
from tests.golden.operands import QKV, make_qkv, sdpa
from tests.support.this_torch import needs_two_masks


def test_heads_sharded_attention_stays(mesh_2d):
    """Split over heads: every rank has the whole sequence of its heads."""
    sharded = [
        distribute_tensor(x, mesh_2d, [Replicate(), Shard(1)])
        for x in make_qkv(2, 4, 16, 8)
    ]
    step = capture_pass(
        "insert_attention", lambda q, k, v: sdpa(q, k, v, is_causal=True), *sharded
    )
    assert step.rewrites == 0
    assert not step.changed
    assert (
        "= scaled_dot_product_attention(l_q_, l_k_, l_v_, is_causal=True)" in step.after
    )


def test_no_attention_stays(mesh):
    step = capture_pass(
        "insert_attention", lambda x: x.relu() + 1, torch.randn(2, 16), mesh=mesh
    )
    assert step.rewrites == 0
    assert not step.changed


@needs_two_masks
def test_attention_with_two_masks_stays(mesh):
    """What to do about it is decided by shard_graph, which knows the placements."""

    def masked(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)

    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    step = capture_pass(
        "insert_attention", masked, *make_qkv(2, 4, 16, 8), mask, mesh=mesh, shard=QKV
    )
    assert step.rewrites == 0
    assert not step.changed
