"""Compiled attention under a mask: one program for all lengths, one look at a mask."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

from cpcompile.geometry import mask_blocks, mask_cache
from cpcompile.geometry.mask_blocks import seen_runs
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked
from tests.cpu.on_ranks import on_ranks
from tests.support import bounds

STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["padded documents", "bias", "bool of heads"])
def test_compiled(pools, strategy, mask):
    """AOTAutograd traces through the DTensors, forward and backward."""
    case = MaskedCase(mask, strategy, world=2, seq=67)
    check_masked(case, pools[2].run(run_masked, case, "aot_eager")[0])


def run_lengths(strategy):
    """How often a program of any length is compiled, and its largest difference."""
    compilations, differences = [], []
    groups = MaskedCase(strategy=strategy).groups(sequence_mesh(2))
    op = getattr(torch.ops.cp, f"{strategy}_attention")
    spec = "scale=0.25 +bias +key_ranges"

    def attend(q, k, v, bias, key_ranges):
        length = key_ranges.shape[1]
        return op(q, k, v, [bias, key_ranges], [length, length], spec, *groups)[0]

    def counting(graph, inputs):
        compilations.append(1)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=counting, dynamic=True, fullgraph=True)
    for length in (64, 96, 128):
        row = torch.arange(length)
        key_ranges = (
            torch.stack([(row - 8).clamp(min=0), row + 1], -1).int().unsqueeze(0)
        )
        shapes = [(1, 4, length // 2, 16)] * 3 + [(1, 1, length // 2, length)]
        leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
        results = []
        for call in (attend, compiled):
            out = call(*leaves, key_ranges)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        differences += [bounds.largest(x - y) for x, y in zip(*results, strict=True)]
    return len(compilations), max(differences)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_program_for_all_lengths(pools, strategy):
    assert pools[2].run(run_lengths, strategy) == [(1, 0.0)] * 2


@pytest.mark.parametrize("constant", [True, False])
@on_ranks(2)
def test_a_constant_mask_is_looked_at_in_the_first_step(constant):
    """Once for all layers, see mask_cache.py; and perhaps once for a plan."""
    length, looks = 24, []
    row = torch.arange(length)
    window = (row <= row[:, None]) & (row > row[:, None] - 5)
    seen = torch.ones(1, 1, 1, length, dtype=torch.bool)

    def layers(x, seen):
        mask = window if constant else window & seen
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    def noted(*args):
        looks.append(1)
        return seen_runs(*args)

    options = {"mesh": sequence_mesh(2), "strategy": "ring", "inner": "aot_eager"}
    options |= {"shard": {"x": 2}, "layout": "contiguous"}
    torch._dynamo.reset()
    mask_cache._blocks.cache_clear()
    compiled = torch.compile(layers, backend="cp", options=options, fullgraph=True)
    x = torch.randn(1, 2, length, 8, requires_grad=True)

    def step(call, x):
        out = call(x, seen)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return {"out": out, "grad of x": grad}

    exact, found = step(layers, x.detach().double().requires_grad_()), []
    with mock.patch.object(mask_blocks, "seen_runs", noted):
        rough = step(layers, x)
        for _ in range(2):
            looks.append(0)
            found += bounds.deviations(step(compiled, x), exact, rough)
    in_steps = "".join(map(str, looks)).split("0")
    first, second = (len(each) for each in in_steps[1:])
    if constant:
        assert first in (1, 2) and second == 0
    else:
        assert (first, second) == (4, 4)
    bounds.check(found)
