"""Section d: all ranks of a ring, one after the other, on one GPU.

Every rank attends to the chunks of all ranks in the order of a ring, by the step
templates with the accumulators carried from step to step; nothing is sent. The sum of
the times of all ranks is compared with one causal attention over the whole sequence by
the fastest vendor kernel: a ratio of 1 is a ring that costs nothing. `slowest` is the
rank that the others would wait for.

    zigzag       rank r holds chunks r and 2N - 1 - r of 2N: equal work for all
    contiguous   rank r holds chunk r of N: the last rank has most of the work
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.kernels import launch
from cpcompile.kernels.constants import RowLimits
from tools.gpu import reference
from tools.gpu.peers import vendor_forwards
from tools.gpu.rates import CAUSAL
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import forward_flops, interleaved, normal, tflops

HEADS, DIM = 32, 128
# Tokens of the ring's sequence, most important first.
TOKENS = (32768, 65536, 16384, 131072, 8192)
RANKS = (4, 8, 2)
VERIFY_TOKENS, VERIFY_HEADS = 8192, 2
SMOKE_TOKENS, SMOKE_HEADS, SMOKE_DIM, SMOKE_RANKS = 256, 1, 16, (4, 2)


class Layout(Enum):
    """A layout: which tokens a rank holds."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"

    def shards(self, x: Tensor, ranks: int) -> list[Tensor]:
        """Return what each rank holds of x [B, H, S, D]."""
        if self is Layout.CONTIGUOUS:
            return [part.contiguous() for part in x.chunk(ranks, 2)]
        parts = x.chunk(2 * ranks, 2)
        return [torch.cat((parts[r], parts[-1 - r]), 2) for r in range(ranks)]

    def whole(self, shards: list[Tensor]) -> Tensor:
        """Invert `shards`."""
        if self is Layout.CONTIGUOUS:
            return torch.cat(shards, 2)
        halves = [x.chunk(2, 2) for x in shards]
        heads, tails = zip(*halves, strict=True)
        return torch.cat((*heads, *reversed(tails)), 2)

    def visible(self, rank: int, source: int, size: int) -> Visible:
        """Return what queries of `rank` see of keys of `source`; shards of `size`."""
        if rank == source:
            return CAUSAL
        if self is Layout.CONTIGUOUS:
            return ALL if source < rank else NOTHING
        if source < rank:
            return Visible(keys=(0, size // 2))
        return Visible(rows=(size // 2, size))


def ring_rank(
    q: Tensor, ks: list[Tensor], vs: list[Tensor], rank: int, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Compute out, in q's dtype, and lse of one rank, step by step."""
    ranks, size = len(ks), q.shape[2]
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    for step in range(ranks):
        source = (rank - step) % ranks
        last, visible = step + 1 == ranks, layout.visible(rank, source, size)
        if visible.is_empty and not last:
            continue  # a compiled ring launches nothing for it
        state = launch.forward(
            q,
            ks[source],
            vs[source],
            *state,
            RowLimits(visible),
            q.shape[-1] ** -0.5,
            last,
        )
    out, lse = state
    assert out is not None and lse is not None
    return out, lse


def operands(tokens: int, heads: int, dim: int, mode: Mode) -> list[Tensor]:
    """Make q, k and v of the whole sequence."""
    torch.manual_seed(0)
    return [normal((1, heads, tokens, dim), mode) for _ in range(3)]


def _shape(mode: Mode) -> tuple[int, int]:
    return (SMOKE_HEADS, SMOKE_DIM) if mode.smoke else (HEADS, DIM)


@dataclass(frozen=True)
class RingItem:
    """Times of the ring in both layouts, and of the whole sequence at once."""

    tokens: int
    ranks: int

    def __str__(self) -> str:
        return f"S={self.tokens} N={self.ranks}"

    def run(self, mode: Mode) -> list[Row]:
        heads, dim = _shape(mode)
        q, k, v = operands(self.tokens, heads, dim, mode)
        functions = dict(vendor_forwards((q, k, v), causal=True))
        functions["ours"] = lambda: launch.forward(
            q, k, v, None, None, RowLimits(CAUSAL), dim**-0.5, True
        )
        for layout in Layout:
            qs, ks, vs = (layout.shards(x, self.ranks) for x in (q, k, v))
            for rank in range(self.ranks):
                functions[f"{layout.value} {rank}"] = functools.partial(
                    ring_rank, qs[rank], ks, vs, rank, layout
                )
        times = interleaved(functions, mode, seconds=1.0)
        pairs = CAUSAL.pairs(self.tokens, self.tokens)
        row = ring_row(times.milliseconds, self.ranks)
        flops = forward_flops(1, heads, pairs, dim)
        names = ("flash", "cudnn", "ours", *(layout.value for layout in Layout))
        row["tflops"] = {
            name: tflops(flops, row["ms"][name]) for name in names if name in row["ms"]
        }
        return [
            {
                "tokens": self.tokens,
                "ranks": self.ranks,
                **row,
                "rounds": times.rounds,
                "errors": times.errors,
            }
        ]


def ring_row(milliseconds: dict[str, float], ranks: int) -> Row:
    """Sum times over ranks, and compare the sums with the fastest vendor's time.

    `milliseconds` has "flash", "cudnn", "ours" and "<layout> <rank>"; what is missing
    is missing in the result.
    """
    ms = {x: milliseconds[x] for x in ("flash", "cudnn", "ours") if x in milliseconds}
    vendor = min((ms[x] for x in ("flash", "cudnn") if x in ms), default=None)
    ratios: dict[str, float] = {}
    of_ranks: dict[str, list[float]] = {}
    for layout in Layout:
        names = [f"{layout.value} {rank}" for rank in range(ranks)]
        if not all(name in milliseconds for name in names):
            continue
        each = of_ranks[layout.value] = [milliseconds[name] for name in names]
        ms[layout.value] = sum(each)
        ms[f"{layout.value} slowest"] = max(each)
        if vendor is not None:
            ratios[layout.value] = vendor / sum(each)
            # The speed-up of N GPUs, over N: they wait for the slowest.
            ratios[f"{layout.value} slowest"] = vendor / (ranks * max(each))
        if "ours" in ms:
            ratios[f"{layout.value} of ours"] = ms["ours"] / sum(each)
    return {"ms": ms, "rank_ms": of_ranks, "ratios": ratios}


@dataclass(frozen=True)
class VerifyItem:
    """A check that the ring's result is that of the whole sequence at once."""

    ranks: int
    layout: Layout

    def __str__(self) -> str:
        return f"result of N={self.ranks} {self.layout.value}"

    def run(self, mode: Mode) -> list[Row]:
        heads, dim = _shape(mode)
        heads, tokens = min(heads, VERIFY_HEADS), VERIFY_TOKENS
        if mode.smoke:
            tokens = SMOKE_TOKENS
        q, k, v = operands(tokens, heads, dim, mode)
        qs, ks, vs = (self.layout.shards(x, self.ranks) for x in (q, k, v))
        parts = [
            ring_rank(qs[rank], ks, vs, rank, self.layout) for rank in range(self.ranks)
        ]
        out = self.layout.whole([out for out, _ in parts])
        lse = self.layout.whole([lse[..., None] for _, lse in parts])[..., 0]
        mask = reference.seen(CAUSAL, None, None, tokens, tokens, mode.device)
        exact = reference.exact(q, k, v, None, mask, dim**-0.5)
        rough = reference.rough(q, k, v, None, mask, dim**-0.5)
        ratio = reference.error_ratio(out, rough["out"], exact["out"], "bfloat16")
        lse_ratio = reference.lse_ratio(lse, exact["lse"], "bfloat16")
        return [
            {
                "tokens": tokens,
                "ranks": self.ranks,
                "layout": self.layout.value,
                "ratios": reference.for_json({"out": ratio, "lse": lse_ratio}),
                "passed": max(ratio, lse_ratio) <= reference.ALLOWED_RATIO,
            }
        ]


def plan(mode: Mode) -> list[RingItem | VerifyItem]:
    """List the checks of results first, then the lengths of the targets."""
    ranks = SMOKE_RANKS if mode.smoke else RANKS
    verify = [VerifyItem(n, layout) for n in ranks for layout in Layout]
    if mode.smoke:
        return [*verify, RingItem(SMOKE_TOKENS, 2)]
    if mode.quick:
        return [VerifyItem(4, Layout.ZIGZAG), RingItem(TOKENS[0], 4)]
    return [*verify, *(RingItem(s, n) for s in TOKENS for n in ranks)]
