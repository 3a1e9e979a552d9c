"""Attention that is left in the sharded graph: fine, refused, or gathered for."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.errors import RewriteError
from tests.golden.capture import capture, warnings
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV, causal, make_qkv, sdpa
from tests.support.this_torch import needs_two_masks


def masked(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask, is_causal=True)


def scaled_and_masked(q, k, v, mask):
    """The operands are not the inputs themselves."""
    return masked(2 * q, 2 * k, 2 * v, mask)


def dropped(q, k, v):
    """An obstacle: nothing is left to divide by 1 - p."""
    return sdpa(q, k, v, dropout_p=1.0)


def scaled_and_dropped(q, k, v):
    return dropped(2 * q, 2 * k, 2 * v)


def test_heads_sharded_attention_is_left_alone(mesh_2d):
    sharded = [
        distribute_tensor(x, mesh_2d, [Replicate(), Shard(1)])
        for x in make_qkv(2, 4, 16, 8)
    ]
    captured = capture(causal, *sharded)
    assert captured["shard_graph"].rewrites == 1
    assert_golden(
        captured.lines("cp_to_local", "scaled_dot"),
        """\
scaled_dot_product_attention = scaled_dot_product_attention(cp_from_local,
    cp_from_local_1, cp_from_local_2, is_causal=True)  # [2, 4, 16, 8] R,S(1)
cp_to_local = cp_to_local(scaled_dot_product_attention, (R, S(1)))  # [2, 1, 16, 8]
return (cp_to_local,)""",
    )


OBSTACLES = {
    "masks": (
        "got attn_mask and is_causal=True, of which torch's kernels use both, or "
        "refuse them; needed one: write the causal limit into the mask"
    ),
    "dropout": "got dropout_p=1.0; needed a probability in [0, 1)",
}
with_an_obstacle = pytest.mark.parametrize(
    ("fn", "unsupported"),
    [
        pytest.param(masked, "masks", marks=needs_two_masks),
        pytest.param(scaled_and_masked, "masks", marks=needs_two_masks),
        (dropped, "dropout"),
        (scaled_and_dropped, "dropout"),
    ],
)


def captured_with(unsupported, fn, mesh, **options):
    mask = [torch.ones(16, 16, dtype=torch.bool)] * (unsupported == "masks")
    return capture(fn, *make_qkv(2, 4, 16, 8), *mask, mesh=mesh, shard=QKV, **options)


@with_an_obstacle
def test_an_obstacle_is_refused(mesh, fn, unsupported):
    captured = captured_with(unsupported, fn, mesh)
    assert type(captured.error) is RewriteError
    assert "shard_graph" not in captured.steps
    assert str(captured.error) == (
        "attention at <top level> (node scaled_dot_product_attention): "
        + OBSTACLES[unsupported]
    )


@with_an_obstacle
def test_and_gathered_for_if_not_strict(mesh, caplog, fn, unsupported):
    captured = captured_with(unsupported, fn, mesh, strict=False)
    assert "= cp_replicated(scaled_dot_product_attention, " in captured.text
    assert "= cp_shard(cp_replicated, 2)" in captured.text
    (text,) = warnings(caplog)
    assert text.startswith("scaled_dot_product_attention at <top level> (File ")
    assert "runs on gathered tensors" in text
    assert OBSTACLES[unsupported].split(";")[0].split(",")[0] in text


@needs_two_masks
def test_a_mask_over_a_whole_sequence_is_fine(mesh_2d, caplog):
    """The twin: nothing is split on the sequence, so nothing needs a mask's part."""
    sharded = [
        distribute_tensor(x, mesh_2d, [Replicate(), Shard(1)])
        for x in make_qkv(2, 4, 16, 8)
    ]
    captured = capture(masked, *sharded, torch.ones(16, 16, dtype=torch.bool))
    (line,) = captured.lines("attn_mask=cp_replicate").splitlines()
    assert line.endswith("# [2, 4, 16, 8] R,S(1)")
    assert warnings(caplog) == []


def test_an_obstacle_of_whole_sequences_stays(mesh, caplog):
    """The twin: nothing is sharded, and every rank computes the same."""
    inputs = [*make_qkv(2, 4, 16, 8), torch.randn(2, 64, 8)]
    captured = capture(
        lambda q, k, v, x: (dropped(q, k, v), x.relu()),
        *inputs,
        mesh=mesh,
        shard={"x": 1},
    )
    assert captured.error is None
    assert "= scaled_dot_product_attention(l_q_, l_k_, l_v_, dropout_p=1)" in (
        captured.text
    )
    (text,) = warnings(caplog)
    assert text.startswith("attention at <top level> (File ")
    assert "with all of its work on every rank: got dropout_p=1.0" in text


def of_embedding(ids, table):
    """Nobody names the ids, and only attention, which is refused, could tell them."""
    x = F.embedding(ids, table).unflatten(-1, (4, 8)).transpose(1, 2)
    return dropped(x, x, x)


def ids_and_table():
    ids = torch.arange(32).view(2, 16)
    return ids, torch.nn.Parameter(torch.randn(32, 32))


def test_an_obstacle_is_met_though_no_input_is_named(mesh):
    captured = capture(of_embedding, *ids_and_table(), mesh=mesh)
    assert type(captured.error) is RewriteError
    assert "got dropout_p=1.0" in str(captured.error)


def test_and_all_else_is_sharded_if_not_strict(mesh, caplog):
    captured = capture(of_embedding, *ids_and_table(), mesh=mesh, strict=False)
    assert captured.error is None
    assert "[2, 16, 32] S(1)" in captured.lines("= embedding(")
    (text,) = warnings(caplog)
    assert "runs on gathered tensors" in text


def test_an_obstacle_is_met_where_tokens_begin(mesh):
    """No input has the tokens: they are patches of an image."""

    def patches(image, weight):
        x = F.conv2d(image, weight, stride=4).flatten(2).transpose(1, 2)
        return dropped(x, x, x)

    inputs = torch.randn(2, 3, 16, 16), torch.nn.Parameter(torch.randn(8, 3, 4, 4))
    captured = capture(patches, *inputs, mesh=mesh)
    assert type(captured.error) is RewriteError
