"""Attention that is left as it is: fine, refused, or gathered for."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.errors import RewriteError
from tests.golden.capture import capture, localised, warnings
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


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="causal"),
        pytest.param(
            (torch.ones(16, 16, dtype=torch.bool),),
            id="and a mask, of whole sequences",
            marks=needs_two_masks,
        ),
    ],
)
def test_heads_sharded_attention_is_left_alone(mesh_2d, caplog, more):
    """Each rank attends with its head; no sequence is split."""
    sharded = [
        distribute_tensor(x, mesh_2d, [Replicate(), Shard(1)])
        for x in make_qkv(2, 4, 16, 8)
    ]
    text = localised(masked if more else causal, *sharded, *more).text
    assert warnings(caplog) == []
    assert "_c10d_functional" not in text


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
    ],
)


def inputs_with(unsupported):
    mask = [torch.ones(16, 16, dtype=torch.bool)] * (unsupported == "masks")
    return *make_qkv(2, 4, 16, 8), *mask


@with_an_obstacle
def test_an_obstacle_is_refused(mesh, fn, unsupported):
    captured = capture(fn, *inputs_with(unsupported), mesh=mesh, shard=QKV)
    assert type(captured.error) is RewriteError
    assert str(captured.error) == (
        "attention at <top level> (node scaled_dot_product_attention): "
        + OBSTACLES[unsupported]
    )


@with_an_obstacle
def test_and_gathered_for_if_not_strict(mesh, caplog, fn, unsupported):
    local = localised(fn, *inputs_with(unsupported), mesh=mesh, shard=QKV, strict=False)
    (call,) = local.report.calls
    assert call.plan is None and call.reason == OBSTACLES[unsupported]
    (text,) = warnings(caplog)
    assert text.startswith("scaled_dot_product_attention runs on gathered tensors")
    assert OBSTACLES[unsupported] in text


def test_an_obstacle_of_whole_sequences_stays(mesh, caplog):
    """The twin: nothing is sharded, and every rank computes the same."""
    inputs = [*make_qkv(2, 4, 16, 8), torch.randn(2, 64, 8)]
    local = localised(
        lambda q, k, v, x: (dropped(q, k, v), x.relu()),
        *inputs,
        mesh=mesh,
        shard={"x": 1},
    )
    assert local.report.gathered == ("relu [2, 64, 8]",)
    assert len(local.lines("= _c10d_functional.all_gather").splitlines()) == 1
    (text,) = warnings(caplog)
    assert text.startswith("attention at <top level> runs unsharded, with all of its")
    assert "on every rank: got dropout_p=1.0" in text


def of_embedding(ids, table):
    """Nobody names the ids, and only attention, which is refused, could tell them."""
    x = F.embedding(ids, table).unflatten(-1, (4, 8)).transpose(1, 2)
    return dropped(x, x, x)


def ids_and_table():
    ids = torch.arange(32).view(2, 16)
    return ids, torch.nn.Parameter(torch.randn(32, 32))


def test_and_all_else_is_sharded_if_not_strict(mesh, caplog):
    local = localised(of_embedding, *ids_and_table(), mesh=mesh, strict=False)
    assert [str(x) for x in local.report.inputs] == ["ids dim 1 (inferred)"]
    assert "= aten.split.Tensor(primals_1, split_size=2, dim=1)" in local.text
    (text,) = warnings(caplog)
    assert "runs on gathered tensors" in text


def of_patches(image, weight):
    """No input has the tokens: they are patches of an image."""
    x = F.conv2d(image, weight, stride=4).flatten(2).transpose(1, 2)
    x = x.unflatten(-1, (2, 4)).transpose(1, 2)
    x = causal(x, x, x)
    return dropped(x, x, x)


IMAGE = torch.randn(2, 3, 16, 16), torch.nn.Parameter(torch.randn(8, 3, 4, 4))


@pytest.mark.parametrize(
    ("fn", "inputs"), [(of_embedding, ids_and_table()), (of_patches, IMAGE)]
)
def test_an_obstacle_is_met_though_no_input_is_named(mesh, fn, inputs):
    captured = capture(fn, *inputs, mesh=mesh)
    assert type(captured.error) is RewriteError
    assert "got dropout_p=1.0" in str(captured.error)
