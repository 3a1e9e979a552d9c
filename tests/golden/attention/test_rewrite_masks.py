"""What the graph looks like when its masks are read."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

import cpcompile as cp
import tests.unit.masks.mask_builders as b
from cpcompile.cost.choose import choose
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.model.masks import unread_masks
from tests.golden.capture import capture, warnings
from tests.golden.golden_text import (
    assert_golden,
    bare_calls,
    lines_with,
    lines_without,
    table,
)

QKV = {"q": 2, "k": 2}


def ancestors(node):
    """The nodes that a node is computed from, and itself."""
    found, stack = set(), [node]
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            stack.extend(each.all_input_nodes)
    return found


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


def rewritten(captured):
    """The attention call as the pass leaves it."""
    return lines_with(bare_calls(captured["rewrite_masks"].after), "= scaled_dot")


def test_packed_check_without_positions(mesh):
    """transformers 5 with use_cache=False: 30 nodes that say "causal"."""
    captured = read(b.packed_without_inputs, mesh=mesh, strict=True)
    assert len(captured["rewrite_masks"].before.splitlines()) > 30
    assert captured["rewrite_masks"].rewrites == 1
    assert_golden(
        lines_without(bare_calls(captured["rewrite_masks"].after), "arange"),
        """\
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_k_,
    attn_mask=None, is_causal=True)
return (scaled_dot_product_attention,)""",
    )
    assert captured.error is None
    assert "= cp.ring_attention(" in captured.text


def test_no_mask(mesh):
    """The twin that does not change."""
    captured = capture(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        *make_qk(2, 2, 16, 8),
        mesh=mesh,
        shard=QKV,
        until="rewrite_masks",
    )
    assert captured["rewrite_masks"].rewrites == 0
    assert not captured["rewrite_masks"].changed


def test_positional_mask_and_is_causal(mesh):
    def model(q, k):
        return F.scaled_dot_product_attention(q, k, k, b.causal(q, k), 0.0, False)

    captured = capture(model, *make_qk(2, 2, 16, 8), mesh=mesh, shard=QKV)
    assert "(l_q_, l_k_, l_k_, None, 0, True)" in rewritten(captured)


def test_hides_nothing(mesh):
    captured = read(b.everything, mesh=mesh, strict=True)
    assert "attn_mask=None, is_causal=False)" in rewritten(captured)


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
    assert "attn_mask=and_)" in rewritten(captures["window"])


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_computed_for_all_pairs_stays(mesh, caplog, strict):
    """The mask lies as DTensor has it, and the operator cuts it."""
    captured = read(lambda q, k: (q @ k.mT) > 0, mesh=mesh, strict=strict)
    assert captured.error is None and warnings(caplog) == []
    assert_golden(
        captured.lines("= matmul(", "= gt(", "ring_attention"),
        """\
matmul = matmul(cp_shard_1, mT)  # [2, 2, 16, 16] S(2)
gt = gt(matmul, 0)  # [2, 2, 16, 16] S(2)
ring_attention_default = cp.ring_attention(cp_shard_1, cp_shard, cp_shard, [gt],
    sizes=[16, 16], spec='scale=0.353553 mask_key=210ef157c8aa2a53 +bias', group=GROUP)
getitem = ring_attention_default[0]  # [2, 2, 16, 8] S(2)""",
    )
    (mask,) = captured.ctx.findings.masks.values()
    assert mask.text == "dense bool [2, 2, 16, 16], by rows"


def test_what_is_plain_is_whole(mesh, caplog):
    numbers = torch.arange(256).view(16, 16)
    captured = read(lambda q, k, x: x.cumsum(-1) % 3 > 0, numbers, mesh=mesh)
    assert captured.error is None and warnings(caplog) == []
    assert_golden(
        captured.lines("cumsum", "% 3", "gt", "+bias"),
        """\
cumsum = .cumsum(l_inputs_0_, -1)  # [16, 16]
mod = mod(cumsum, 3)  # [16, 16]
gt = gt(mod, 0)  # [16, 16]
unsqueeze = unsqueeze(gt, 0)  # [1, 16, 16]
ring_attention_default = cp.ring_attention(cp_shard, cp_shard_1, cp_shard_1,
    [cp_replicate], sizes=[16, 16],
    spec='scale=0.353553 mask_key=210ef157c8aa2a53 +bias', group=GROUP)""",
    )
    (mask,) = captured.ctx.findings.masks.values()
    assert mask.text == "dense bool [16, 16], whole on every rank (256 bytes)"
    (plan,) = captured.ctx.findings.plans.values()
    without = replace(plan.workload, whole_mask_bytes=0)
    best = choose(without, plan.profile, strategy=plan.strategy).chosen
    assert plan.chosen.peak_extra_bytes == best.peak_extra_bytes + 256


def test_what_a_large_one_costs(mesh, caplog, monkeypatch):
    """Products of all pairs with all pairs are no matter of rows."""
    monkeypatch.setattr(unread_masks, "LEAST_LIMIT", 255)
    numbers = torch.arange(256).view(16, 16)
    with cp.config.patch(whole_mask_share=0.0):
        read(lambda q, k, x: x.cumsum(-2) % 3 > 0, numbers, mesh=mesh, strict=True)
    assert_golden(
        "\n".join(warnings(caplog)),
        """\
attention at <top level>: got an attn_mask that cannot be read as a function of
    positions (cumsum (aten.cumsum.default) is computed of all pairs at once), a dense
    bool [16, 16] of which every rank computes all 256 bytes; the result is correct.
    Needed one that is an input of the graph, or computed row by row from values of the
    queries and of the keys""",
    )


def test_rows_of_a_large_one(mesh, caplog, monkeypatch):
    """Sums along the keys are row by row, so that ranks have those of their queries."""
    monkeypatch.setattr(unread_masks, "LEAST_LIMIT", 255)
    numbers = torch.arange(256).view(16, 16)
    with cp.config.patch(whole_mask_share=0.0):
        captured = read(
            lambda q, k, x: x.cumsum(-1) % 3 > 0, numbers, mesh=mesh, strict=True
        )
    assert captured.error is None and warnings(caplog) == []
    assert_golden(
        captured.lines("alias", "cumsum", "gt"),
        """\
alias_default = aten.alias(l_inputs_0_)  # [16, 16]
cp_shard_2 = cp_shard(alias_default, 0)  # [16, 16] S(0)
cumsum_default = aten.cumsum(cp_shard_2, dim=-1)  # [16, 16] S(0)
remainder_scalar = aten.remainder.Scalar(cumsum_default, other=3)  # [16, 16] S(0)
gt_scalar = aten.gt.Scalar(remainder_scalar, other=0)  # [16, 16] S(0)
permute_default = aten.permute(gt_scalar, dims=[0, 1])  # [16, 16] S(0)""",
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
    i, j = torch.arange(16.0)[:, None], torch.arange(16.0)
    return torch.sin(i * j)


class Relative(nn.Module):
    """T5: a bias that is looked up, with a weight that is trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2))

    def forward(self, q, k):
        return F.scaled_dot_product_attention(
            q, k, k, attn_mask=b.relative(q, k, self.weight)
        )


OF_POSITIONS = {
    "relative": (Relative(), (), (1, 2, 31)),
    "alibi": (attend(b.alibi), (), (1, 2, 31)),
    "given for one row": (attend(b.given), (torch.randn(2, 1, 1, 16),), (2, 1, 16)),
}


@pytest.mark.parametrize("case", OF_POSITIONS)
def test_a_bias_of_positions_is_one_number_each(mesh, case):
    """Nothing is computed for all pairs, and any layout may be chosen."""
    model, inputs, shape = OF_POSITIONS[case]
    captured = capture(model, *make_qk(2, 2, 16, 8), *inputs, mesh=mesh, shard=QKV)
    (mask,) = captured.ctx.findings.masks.values()
    value = fake_value(mask.bias)
    assert value.shape == shape and not captured.ctx.findings.mask_rows
    assert value.requires_grad == (case == "relative")
    computed = [
        node
        for node in ancestors(mask.bias)
        if isinstance(fake_value(node), torch.Tensor)
        and fake_value(node).numel() > max(math.prod(shape), 2 * 31)
    ]
    assert computed == []


BIASES = {
    "outer product": (attend(outer_product), ()),
    "blocks": (attend(b.blocks), (torch.arange(16).expand(2, -1) // 3,)),
    "sinks": (attend(b.sinks), ()),
    "rows or lowest": (attend(b.causal_padding_lowest), (torch.ones(2, 16),)),
    "given": (attend(b.given), (torch.randn(2, 1, 16, 16),)),
    "given as part of a buffer": (
        attend(lambda q, k, m: m[:, :, 1:17, 2:18]),
        (torch.randn(1, 1, 20, 20),),
    ),
}


@pytest.mark.parametrize("case", BIASES)
def test_rows_of_a_bias_are_sharded(mesh, caplog, case):
    """Each rank holds its rows only."""
    model, inputs = BIASES[case]
    captured = capture(
        model, *make_qk(2, 2, 16, 8), *inputs, mesh=mesh, shard=QKV, strict=False
    )
    (mask,) = captured.ctx.findings.masks.values()
    value = fake_value(mask.bias)
    if case.startswith("given"):  # sharded where the operator of the call reads it
        assert captured.ctx.findings.mask_rows == {mask.bias: 2}
        return
    assert isinstance(value, DTensor)
    assert value.placements == (Shard(2),)
    assert value.shape[2:] == (16, 16) and value.to_local().shape[2] == 2
    texts = [w for w in warnings(caplog) if "attn_mask" not in w]
    assert texts == []
    computed = [
        node
        for node in ancestors(mask.bias)
        if node.op == "call_function"
        and isinstance(fake_value(node), torch.Tensor)
        and not isinstance(fake_value(node), DTensor)
        and fake_value(node).numel() >= 16 * 16
        and node.target is not torch.ops.aten.slice.Tensor  # of the input
        and node.target is not torch.ops.aten.alias.default
    ]
    assert computed == [], "computed for all pairs on every rank"
