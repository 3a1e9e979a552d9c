"""Masks that layers share, dead nodes, regions, writes, long sequences."""

import resource
import time
from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tests.unit.masks.mask_builders as b
from cpcompile.geometry.lengths import LengthNotSymbolic
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import all_nodes
from cpcompile.passes.graph.readable import readable
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.rewrite_masks import rewrite_masks
from tests.support.bounds import assert_equal
from tests.support.position_biases import of_pairs
from tests.unit.masks.mask_cases import attend, check, operands, read, text_of

S = 21
sdpa = F.scaled_dot_product_attention

EIGHT_RANKS = SimpleNamespace(size=lambda axis: 8)


def visible(*hidden: int) -> torch.Tensor:
    mask = torch.ones(2, S, dtype=torch.bool)
    mask[0, list(hidden)] = False
    return mask


def targets(found) -> list[str]:
    return [n.name for n in all_nodes(found.after.graph) if n.op.startswith("call_")]


def test_layers_share_a_reading():
    def model(q, k, attention_mask):
        mask = b.padded_by_broadcast(q, k, attention_mask)
        other = b.causal(q, k)
        for _ in range(3):
            q = sdpa(q, k, k, attn_mask=mask)
            q = sdpa(q, k, k, other)
        return q

    found = read(model, *operands(S), visible(3))
    assert found.texts == ["causal, key padding", "is_causal"] * 3
    assert found.count == 2
    assert len({mask.nodes for mask in found.masks if mask}) == 1
    check(found, *operands(S), visible(3, 7, 8))


@pytest.mark.parametrize(
    "builder",
    [b.causal, b.packed_without_inputs, b.vmap_causal, b.in_place_fill, b.everything],
)
def test_what_only_a_mask_needed_is_gone(builder):
    found = read(attend(builder), *operands(S))
    if builder is b.packed_without_inputs:  # has an index that it does not use
        found.after.graph.eliminate_dead_code()
    assert targets(found) == ["scaled_dot_product_attention"]
    assert found.masks == [None]


def test_what_others_read_stays():
    def model(q, k):
        positions = torch.arange(q.shape[-2])
        mask = torch.zeros(len(positions), len(positions), dtype=torch.bool)
        mask.logical_or_(positions[:, None] >= positions)
        row = mask[3]
        row.logical_not_()
        row.logical_not_()
        return sdpa(q, k, k, attn_mask=mask) + positions[:, None], row

    q, k = operands(S)
    found = read(model, q, k)
    assert found.texts == ["is_causal"]
    left = targets(found)
    assert "row" in left and len([x for x in left if "logical_not_" in x]) == 2
    results = [found.after(*found.seen[0]), found.before(*found.seen[0])]
    for x, y in zip(*results, strict=True):
        assert_equal("result", x, y)


def test_writes_into_masks_and_inputs():
    def model(q, k):
        mask = b.causal(q, k).clone()
        q = sdpa(q, k, k, attn_mask=mask)
        mask[:, 5:].logical_not_()
        return sdpa(q, k, k, attn_mask=mask)

    found = read(model, *operands(S))
    assert found.texts[0] == "is_causal"
    assert found.texts[1] != "is_causal"
    check(found, *operands(S))

    def mask_of(q, k, attention_mask):
        attention_mask.logical_not_()
        return attention_mask[:, None, None, :].expand(-1, -1, S, -1)

    q, k = operands(S)
    found = read(attend(mask_of), q, k, visible(2))
    assert found.text == "unread"
    assert "writes into an input" in found.masks[0].unread.reason
    check(found, q, k, visible(4, 5))


def test_checkpoint_regions():
    def model(q, k, attention_mask):
        padded = b.padded_by_broadcast(q, k, attention_mask)
        plain = b.causal(q, k)

        def layer(q, mask):
            return sdpa(q, k, k, attn_mask=mask)

        def converts(q, mask):
            return sdpa(q, k, k, attn_mask=torch.where(mask, 0.0, float("-inf")))

        def builds(q, mask):
            return sdpa(q, k, k, attn_mask=b.window(q, k))

        def nests(q, mask):
            return checkpoint(layer, q, mask, use_reentrant=False)

        for each, mask in (
            (layer, padded),
            (layer, plain),
            (converts, padded),
            (converts, plain),
            (builds, plain),
            (nests, padded),
            (nests, plain),
        ):
            q = checkpoint(each, q, mask, use_reentrant=False)
        return layer(q, padded)

    q, k = operands(S)
    found = read(model, q.requires_grad_(), k, visible(4))
    padded = "causal, key padding"
    window = "causal, window 8"
    assert found.texts == [
        *(padded, "is_causal", padded, "is_causal", window, padded, "is_causal", padded)
    ]
    check(found, q, k, visible(1, 2, 9))
    assert "and_" in readable(found.after.graph)  # the calls are not rewritten yet


def test_a_causal_mask_of_a_region_is_gone():
    def model(q, k):
        mask = b.causal(q, k)
        for _ in range(2):
            q = checkpoint(
                lambda q, m: sdpa(q, k, k, attn_mask=m), q, mask, use_reentrant=False
            )
        return q

    q, k = operands(S)
    found = read(model, q.requires_grad_(), k)
    assert found.texts == ["is_causal"] * 2
    assert not [x for x in targets(found) if x not in ("q", "q_1") and "sca" not in x]
    before, after = (m(*found.seen[0])[0] for m in (found.before, found.after))
    assert_equal("out", before, after)


def test_a_length_that_is_a_symbol():
    q, _ = operands(S)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(q, 2)
    errors = []

    def backend(gm, _):
        ctx = Context(mesh=EIGHT_RANKS, axis=0, inputs={}, profile=None)
        find_attention(gm.graph, ctx)
        with pytest.raises(LengthNotSymbolic, match="has a symbolic size") as error:
            rewrite_masks(gm.graph, ctx)
        errors.append(error)
        return gm.forward

    torch.compile(attend(b.causal), backend=backend)(q, q)
    assert errors


class Stop(BaseException):
    """Ends a compilation."""


@pytest.mark.parametrize(
    ("builder", "data", "name"),
    [
        (b.packed_without_inputs, "", "is_causal"),
        (b.packed_windows, "position_ids", "causal, window 5, same document"),
        (b.chunks_after_padding, "attention_mask", "causal, equal ids, key padding"),
        (b.prefix, "lengths", "key ranges from data"),
        (b.both_sides, "", "window of 4 to each side"),
        (b.alibi, "", "causal, bias by distance"),
    ],
)
def test_a_million_tokens(builder, data, name):
    """All pairs would be 2 TB: reading takes integers per token, and seconds."""
    n = 1_000_000
    q = torch.ones(1).expand(2, 2, n, 4)
    inputs = {
        "": [],
        "position_ids": [torch.arange(n).expand(2, -1)],
        "attention_mask": [torch.ones(2, n, dtype=torch.long)],
        "lengths": [torch.tensor([3, 4])],
    }[data]
    seen = []

    def backend(gm, _):
        ctx = Context(mesh=EIGHT_RANKS, axis=0, inputs={}, profile=None)
        find_attention(gm.graph, ctx)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        rewrite_masks(gm.graph, ctx)
        seconds = time.process_time() - start
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        mask = ctx.findings.masks.get(ctx.findings.calls[0])
        text = text_of(ctx.findings.calls[0], mask)
        seen.append((text, seconds, grown / 2**20))
        raise Stop

    torch._dynamo.reset()
    with pytest.raises(Stop):
        torch.compile(attend(builder), backend=backend, dynamic=False)(q, q, *inputs)
    ((text, seconds, gigabytes),) = seen
    assert text == name
    assert seconds < 20, f"{seconds:.1f} s"
    assert gigabytes < 2, f"{gigabytes:.2f} GiB"


def test_a_weight_gets_the_gradient_of_the_model():
    """A bias from a look-up is the model's, forward and backward."""
    weight = torch.randn(8, 2, requires_grad=True)
    grads = []

    def backend(gm, inputs):
        ctx = Context(mesh=None, axis=0, inputs={}, profile=None)
        find_attention(gm.graph, ctx)
        (wanted,) = (call.mask for call in ctx.findings.calls)
        rewrite_masks(gm.graph, ctx)
        bias = ctx.findings.masks[ctx.findings.calls[0]].bias
        (output,) = gm.graph.find_nodes(op="output")
        output.args = ((bias, wanted),)
        return fx.Interpreter(gm).run  # code cannot name what its calls hold

    model = attend(b.relative)

    def both_biases(q, k, weight):
        return model(q, k, weight), weight * 1

    torch._dynamo.reset()
    fn = torch.compile(both_biases, backend=backend, fullgraph=True, dynamic=False)
    for x in fn(*operands(S), weight):
        x = of_pairs(x, S, S)
        (grad,) = torch.autograd.grad((x * torch.arange(S)).sum(), weight)
        grads.append(grad)
    assert_equal("grad of weight", *grads)
    assert grads[0].abs().max() > 0
