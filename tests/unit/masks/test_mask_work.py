"""What a mask leaves, against counts of a dense mask."""

from dataclasses import replace

import pytest
import torch
import torch.fx as fx

from cpcompile.cost.choose import choose
from cpcompile.cost.plans import RingWork, Strategy
from cpcompile.cost.strategies import factorisations
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.masks import Mask
from cpcompile.passes.graph.constant_arguments import Constant
from cpcompile.passes.model.masks.analysis.mask_writer import cp_constant
from cpcompile.passes.model.masks.mask_work import MaskWork, mask_work
from tests.unit.cost.cost_cases import H100, LLAMA


def limited(lower: torch.Tensor, upper: torch.Tensor) -> Mask:
    """A mask of known key ranges [B, Sq]."""
    value = torch.stack([lower, upper], -1).to(torch.int32)
    return Mask(
        "known", key_ranges=fx.Graph().call_function(cp_constant, (Constant(value),))
    )


def window(queries: int, keys: int, before: int, after: int) -> Mask:
    row = torch.arange(queries)[None]
    key_ranges = (row - before + 1, row + after + 1)
    return limited(*(x.clamp(0, keys) for x in key_ranges))


def counted(
    mask: Mask, q_len: int, kv_len: int, ranks: int, layout: Layout
) -> MaskWork:
    """By a dense mask."""
    assert mask.key_ranges is not None
    constant = mask.key_ranges.args[0]
    assert isinstance(constant, Constant)
    key_ranges = constant.value
    key = torch.arange(kv_len)
    seen = (key >= key_ranges[..., :1]) & (key < key_ranges[..., 1:])
    rows, keys = (TokenLayout.of(layout, n, ranks) for n in (q_len, kv_len))

    def of_ring(groups: list[list[int]]) -> tuple[float, int]:
        """Where each rank of a ring has the tokens of a group of ranks."""
        steps, work = {0}, []
        for place, group in enumerate(groups):
            own = seen[:, torch.cat([rows.positions(rank) for rank in group])]
            work.append(int(own.sum()))
            for other, sources in enumerate(groups):
                there = torch.cat([keys.positions(source) for source in sources])
                if own[:, :, there].any():
                    steps.add((place - other) % len(groups))
        whole = key_ranges.shape[0] * kv_len * rows.size * len(groups[0])
        return max(work) / whole, len(steps)

    live, steps = of_ring([[rank] for rank in range(ranks)])
    hybrids = []
    for degrees in factorisations(ranks):
        u, r = degrees.ulysses, degrees.ring
        together = [list(range(i * u, i * u + u)) for i in range(r)]
        if degrees.inner == "ring":
            together = [list(range(i, ranks, r)) for i in range(r)]
        if degrees.inner == "ulysses" or layout is Layout.CONTIGUOUS:
            hybrids.append(RingWork(degrees, *of_ring(together)))
    return MaskWork(
        live_fraction=live,
        mean_live_fraction=int(seen.sum()) / (key_ranges.shape[0] * kv_len * q_len),
        ring_steps=steps,
        hybrid_rings=tuple(hybrids),
    )


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("length", [16, 17, 5])
@pytest.mark.parametrize("sides", [(3, 0), (3, 2), (100, 0), (1, 0)])
def test_windows(layout, ranks, length, sides) -> None:
    mask, sizes = window(length, length, *sides), (length, length, ranks, layout)
    assert mask_work(mask, *sizes) == counted(mask, *sizes)


BATCH = torch.tensor([[2] * 16, [16] * 16])


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (window(7, 19, 4, 3), (7, 19, 3)),
        (window(19, 7, 4, 3), (19, 7, 3)),
        (limited(torch.zeros_like(BATCH), BATCH), (16, 16, 4)),
    ],
)
def test_other_keys_than_queries_and_a_batch(mask, sizes) -> None:
    sizes = (*sizes, Layout.CONTIGUOUS)
    assert mask_work(mask, *sizes) == counted(mask, *sizes)


def test_what_comes_with_the_data_hides_nothing() -> None:
    node = fx.Graph().placeholder("key_ranges")
    assert (
        mask_work(Mask("data", key_ranges=node), 16, 16, 4, Layout.CONTIGUOUS)
        == MaskWork()
    )
    node.meta["example_value"] = torch.zeros(1, 1, 16, 16)
    work = mask_work(Mask("dense", bias=node), 16, 16, 4, Layout.CONTIGUOUS)
    assert work == MaskWork(bias_bytes=16 * 16 * 4)


def test_ulysses_is_charged_with_the_mean() -> None:
    """Its ranks have all tokens; that of the slowest rank counts for the others."""
    masked = replace(LLAMA, causal=False, masked=True, live_fraction=0.9)
    mean = replace(masked, mean_live_fraction=0.5)

    def seconds(load, strategy: Strategy) -> float:
        plan = choose(load, H100, strategy=strategy, runnable=True)
        assert plan.chosen.seconds is not None
        return plan.chosen.seconds

    assert seconds(mean, Strategy.ULYSSES) < seconds(masked, Strategy.ULYSSES)
    assert seconds(mean, Strategy.RING) == seconds(masked, Strategy.RING)
