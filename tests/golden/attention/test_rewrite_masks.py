"""What the graph looks like when its masks are read."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cpcompile as cp
import tests.unit.masks.mask_builders as b
from cpcompile.compile import inner_compilers
from cpcompile.cost.choose import choose
from cpcompile.passes.model.masks import unread_masks
from cpcompile.passes.whole.attention_nodes import is_attention
from cpcompile.torch_private.dynamo import boxed_nop
from tests.golden.capture import capture, localised, warnings
from tests.golden.golden_text import (
    assert_golden,
    table,
)

QKV = {"q": 2, "k": 2}


def make_qk(*shape):
    return torch.randn(shape), torch.randn(shape)


def attend(mask_of):
    def model(q, k, *inputs):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask_of(q, k, *inputs))

    return model


def read(mask_of, *inputs, mesh, strict=False):
    return capture(
        attend(mask_of),
        *make_qk(2, 2, 16, 8),
        *inputs,
        mesh=mesh,
        shard=QKV,
        strict=strict,
    )


def masks(captured):
    return "\n".join(
        f"{mask.text}: key_ranges={mask.key_ranges}, "
        f"ids={mask.q_segment_ids}, {mask.kv_segment_ids}, bias={mask.bias}"
        for mask in captured.ctx.findings.masks.values()
    )


MASKS = {
    "window": (b.window, ()),
    "padding": (b.padded_by_broadcast, (torch.ones(2, 16),)),
    "packed": (b.packed_by_broadcast, (torch.arange(16).expand(2, -1),)),
}


def test_what_masks_say(mesh):
    """And the mask stays, for a call that is not rewritten."""
    captures = {n: read(fn, *more, mesh=mesh) for n, (fn, more) in MASKS.items()}
    assert_golden(
        table({name: masks(x) for name, x in captures.items()}),
        """\
window: causal, window 8: key_ranges=cp_constant, ids=None, None, bias=None
padding: causal, key padding: key_ranges=cp_constant, ids=cp_constant_1, expand_default,
    bias=None
packed: causal, same document: key_ranges=cp_constant, ids=expand_default,
    expand_default_1, bias=None""",
    )
    assert "attn_mask=and_)" in captures["window"]["rewrite_masks"].after


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_computed_of_tokens_is_made_by_rows(mesh, caplog, strict):
    """Each rank has the mask of its queries, as DTensor shares out the product."""
    of_tokens = attend(lambda q, k: (q @ k.mT) > 0)
    inputs = make_qk(2, 2, 16, 8)
    local = localised(of_tokens, *inputs, mesh=mesh, shard=QKV, strict=strict)
    assert warnings(caplog) == []
    (call,) = local.report.calls
    assert call.mask == "dense bool [2, 2, 16, 16], by rows"
    assert call.plan.workload.whole_mask_bytes == 0
    assert_golden(
        local.lines("view(bmm_1", "= aten.gt", "attention"),
        """\
view_5 = aten.view(bmm_1, size=[2, 2, 2, 16])
gt_1 = aten.gt.Scalar(view_6, other=0)
all_gather_attention_1 = cp.all_gather_attention(clone_1, view_7, view_8, [gt_1],
    sizes=[16, 16], spec='scale=0.353553 mask_key=210ef157c8aa2a53 +bias whole_keys',
    group='0')
getitem_34 = all_gather_attention_1[0]""",
    )


def along_keys(q, k, numbers):
    return numbers.cumsum(-1) % 3 > 0


def along_queries(q, k, numbers):
    """Products of all pairs with all pairs are no matter of rows."""
    return numbers.cumsum(-2) % 3 > 0


def test_what_is_plain_is_whole(mesh, caplog):
    """Every rank makes all of it, which counts as memory of the call."""
    inputs = *make_qk(2, 2, 16, 8), torch.arange(256).view(16, 16)
    local = localised(attend(along_keys), *inputs, mesh=mesh, shard=QKV)
    assert warnings(caplog) == []
    (call,) = local.report.calls
    assert call.mask == "dense bool [16, 16], whole on every rank (256 bytes)"
    plan = call.plan
    without = replace(plan.workload, whole_mask_bytes=0)
    best = choose(without, plan.profile, strategy=plan.strategy).chosen
    assert plan.chosen.peak_extra_bytes == best.peak_extra_bytes + 256


def test_what_a_large_one_costs(mesh, caplog, monkeypatch):
    monkeypatch.setattr(unread_masks, "LEAST_LIMIT", 255)
    inputs = *make_qk(2, 2, 16, 8), torch.arange(256).view(16, 16)
    with cp.config.patch(whole_mask_share=0.0):
        localised(attend(along_queries), *inputs, mesh=mesh, shard=QKV)
    assert_golden(
        "\n".join(warnings(caplog)),
        """\
attention at <top level>: got an attn_mask that cannot be read as a function of
    positions (cumsum (aten.cumsum.default) is computed of all pairs at once), a dense
    bool [16, 16] of which every rank computes all 256 bytes; the result is correct.
    Needed one that is an input of the graph, or computed row by row from values of the
    queries and of the keys""",
    )


def test_a_mask_that_makes_q_larger_is_an_obstacle(mesh):
    """A bias has no more batches than q, and torch on a CPU takes no such mask."""
    seen = torch.ones(3, 1, 16, 16, dtype=torch.bool)
    captured = capture(
        attend(b.given), *make_qk(1, 2, 16, 8), seen, mesh=mesh, shard=QKV
    )
    assert "attn_mask of shape [3, 1, 16, 16] for q [1, 2, 16, 8]" in str(
        captured.error
    )


def outer_product(q, k):
    """No function of the distance, though one of positions alone."""
    i, j = (torch.arange(float(x.shape[-2])) for x in (q, k))
    i = i[:, None]
    return torch.sin(i * j)


S = 1024  # so many tokens that a mask of all pairs has a megabyte
NUMBERS = torch.randn(1, 1, S + 4, S + 4)
BIASES = {
    "outer product": (outer_product, ()),
    "blocks": (b.blocks, (torch.arange(S).expand(2, -1) // 3,)),
    "sinks": (b.sinks, ()),
    "rows or lowest": (b.causal_padding_lowest, (torch.ones(2, S),)),
    "given": (b.given, (torch.randn(2, 1, S, S),)),
    "part of a buffer": (lambda q, k, m: m[:, :, 1 : S + 1, 2 : S + 2], (NUMBERS,)),
    "of two parts": (lambda q, k, m: (m + 2 * m.mT)[..., :S, :S], (NUMBERS,)),
    "along keys": (lambda q, k, m: along_keys(q, k, m[..., :S, :S]), (NUMBERS,)),
}


@pytest.mark.parametrize("case", BIASES)
def test_no_rank_makes_all_pairs(mesh, caplog, monkeypatch, case):
    """Each rank makes the rows of its queries, also where a mask is not read."""
    monkeypatch.setattr(unread_masks, "LEAST_LIMIT", 0)
    mask_of, inputs = BIASES[case]
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        return boxed_nop(module, inputs)

    monkeypatch.setattr(inner_compilers, "boxed_nop", keep)
    with cp.config.patch(whole_mask_share=0.0):
        qk = make_qk(2, 2, S, 8)
        localised(attend(mask_of), *qk, *inputs, mesh=mesh, shard=QKV)
    assert warnings(caplog) == []
    (graph,) = graphs
    (attention,) = filter(is_attention, graph.nodes)
    bias, *_ = attention.args[3]
    assert bias.meta["val"].shape[2:] == (S // 8, S)
    made = [
        f"{node.target} {list(value.shape)}"
        for node in graph.nodes
        if node.op == "call_function" and not getattr(node.target, "is_view", False)
        if isinstance(value := node.meta["val"], torch.Tensor)
        if value.numel() >= S * S
    ]
    assert made == []
