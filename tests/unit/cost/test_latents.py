"""Keys that every rank makes of something narrower: what that costs, and saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cpcompile as cp
from cpcompile.cost.choose import choose
from cpcompile.cost.latents import latent_prices
from cpcompile.cost.plans import Direction, Latents, Strategy, Workload
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, IDEAL, LLAMA, NO_COMPUTATION

# DeepSeek-V3: 128 heads, k 192 and v 128 wide, made of 576 numbers a token.
MLA = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_dim": 128}
MADE = 128 * (192 + 128)
SOURCES = Latents(values=1, bytes=576 * 2, flops=2 * 576 * MADE, moved=0)
CALL = replace(LLAMA, **MLA, latents=SOURCES)


def candidate(call: Workload, profile=NO_COMPUTATION, strategy=Strategy.LATENTS):
    return choose(call, profile, strategy=strategy).chosen


def test_bytes_are_those_of_the_latents() -> None:
    """Each way once in the forward, and twice in the backward."""
    for direction, times in ((Direction.FORWARD, 1), (Direction.BOTH, 3)):
        call = replace(CALL, direction=direction)
        of_others = call.kv_len * 576 * 2 * (call.ranks - 1) / call.ranks
        assert candidate(call).wire_bytes == times * round(of_others)
    keys = candidate(CALL, strategy=Strategy.ALL_GATHER).wire_bytes
    assert keys / candidate(CALL).wire_bytes == pytest.approx(MADE / 576)


def test_work_is_done_again_on_every_rank() -> None:
    """The forward's on every rank; the backward's twice that, and once more."""
    free = replace(IDEAL, forward_flops_per_second=1e12)
    call = replace(CALL, q_len=8, causal=False)  # whose attention is nothing beside it
    whole = call.kv_len * SOURCES.flops / 1e12
    share = 1 - 1 / call.ranks
    for direction, times in (
        (Direction.FORWARD, share),
        (Direction.BACKWARD, 1 + 2 * share),
        (Direction.BOTH, 1 + 3 * share),
    ):
        own = replace(call, direction=direction)
        less = replace(own, latents=replace(SOURCES, flops=0))
        more = [candidate(x, free).seconds for x in (own, less)]
        assert more[0] - more[1] == pytest.approx(times * whole)


def test_prices_are_what_the_formula_grows_by() -> None:
    prices = latent_prices(CALL, H100)
    before = candidate(CALL, H100)
    for field, price, more in (
        ("values", prices.value, 1),
        ("bytes", prices.byte, 64),
        ("flops", prices.flop, 1e6),
        ("moved", prices.moved, 512),
    ):
        grown = replace(SOURCES, **{field: getattr(SOURCES, field) + more})
        after = candidate(replace(CALL, latents=grown), H100)
        assert after.seconds - before.seconds == pytest.approx(price * more)


def test_only_calls_with_latents_have_it() -> None:
    named = {c.strategy for c in choose(LLAMA, H100).candidates}
    assert Strategy.LATENTS not in named
    with pytest.raises(RewriteError, match="k and v are not made, token by token"):
        choose(LLAMA, H100, strategy=Strategy.LATENTS)


def test_one_rank_pays_nothing() -> None:
    cost = STRATEGIES[Strategy.LATENTS].cost(True, Layout.CONTIGUOUS, True)
    gathered = STRATEGIES[Strategy.ALL_GATHER].cost(True, Layout.CONTIGUOUS, True)
    call = replace(CALL, ranks=1)
    alone = [candidate(call, H100, s) for s in (Strategy.LATENTS, Strategy.ALL_GATHER)]
    assert alone[0].seconds == pytest.approx(alone[1].seconds)
    assert cost.kernels == gathered.kernels


def plan(**changes):
    sizes = {"batch": 1, "seq": 16384, "ranks": 8, "latent_dim": 576}
    return cp.plan(**(MLA | sizes | changes))


def test_where_it_is_best() -> None:
    """Between nodes, and not where heads are exchanged within one."""
    assert plan(ranks_per_node=1).strategy is Strategy.LATENTS
    assert plan(ranks_per_node=8).strategy is Strategy.ULYSSES
    with pytest.raises(ValueError, match="latent_dim is 0; needed a positive integer"):
        plan(latent_dim=0)
