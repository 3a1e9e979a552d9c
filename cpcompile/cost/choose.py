"""Predicts every strategy for one attention call and chooses the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile import config
from cpcompile.cost import model
from cpcompile.cost.hardware import HardwareProfile
from cpcompile.errors import CannotRewrite
from cpcompile.plan import Candidate, Plan, Strategy, Workload


@dataclass(frozen=True)
class _StrategyModel:
    """What is known of one strategy; arguments are `causal` and then `backward`."""

    why_excluded: Callable[[Workload], str | None]
    forward_seconds: Callable[[bool], sympy.Expr]
    backward_seconds: Callable[[bool], sympy.Expr]
    exposed_seconds: Callable[[bool, bool], sympy.Expr]
    peak_extra_bytes: Callable[[bool, bool], sympy.Expr]
    kernels: Callable[[bool], sympy.Expr]


def _why_heads_do_not_group(workload: Workload) -> str | None:
    heads, kv_heads = workload.heads, workload.kv_heads
    if heads % kv_heads == 0:
        return None
    return (
        f"{heads} query heads are not a multiple of {kv_heads} key/value heads; "
        f"repeat the key/value heads in the model"
    )


_MODELS = {
    Strategy.RING: _StrategyModel(
        _why_heads_do_not_group,
        model.ring_forward_seconds,
        model.ring_backward_seconds,
        model.ring_exposed_seconds,
        model.ring_peak_extra_bytes,
        model.ring_kernels,
    ),
    Strategy.ALL_GATHER: _StrategyModel(
        _why_heads_do_not_group,
        model.all_gather_forward_seconds,
        model.all_gather_backward_seconds,
        model.all_gather_exposed_seconds,
        model.all_gather_peak_extra_bytes,
        model.all_gather_kernels,
    ),
}


def choose(
    workload: Workload, profile: HardwareProfile, strategy: Strategy | None = None
) -> Plan:
    """The plan for one attention call, with every candidate, best first.

    Times that differ from the best by at most `config.tie_fraction` of it are a tie:
    less memory, then fewer kernels decide. `strategy`, if given, is chosen whatever it
    costs; the candidates are listed in the same order then.

    Raises: CannotRewrite if the forced strategy, or every strategy, is excluded.
    """
    ranked = rank([predict(each, workload, profile) for each in Strategy])
    wanted = ranked[0].strategy if strategy is None else strategy
    reason = next(c.excluded for c in ranked if c.strategy is wanted)
    if reason is not None:
        raise CannotRewrite(f"strategy {wanted.value} is impossible here: {reason}")
    return Plan(
        strategy=wanted,
        layout="contiguous",
        forced=strategy is not None,
        hardware=profile.name,
        candidates=ranked,
    )


def predict(
    strategy: Strategy, workload: Workload, profile: HardwareProfile
) -> Candidate:
    """One strategy with its predicted cost on the slowest rank, or why it is out."""
    reason = _MODELS[strategy].why_excluded(workload)
    if reason is not None:
        return Candidate(strategy, None, None, None, None, excluded=reason)
    evaluate = _compiled(strategy, workload.causal, workload.backward)
    numbers = model.numbers(workload, profile)
    seconds, exposed, peak, kernels = evaluate(
        *(numbers[symbol] for symbol in model.SYMBOLS)
    )
    return Candidate(strategy, seconds, exposed, round(peak), round(kernels))


def rank(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Best first: those that tie with the fastest, the slower ones, the excluded."""
    best = min((c.seconds for c in candidates if c.seconds is not None), default=0.0)
    limit = best * (1 + config.tie_fraction)

    def order(candidate: Candidate) -> tuple[int, float, float, float]:
        seconds, peak = candidate.seconds, candidate.peak_extra_bytes
        if seconds is None or peak is None or candidate.kernels is None:
            return (2, 0.0, 0.0, 0.0)
        if seconds <= limit:
            return (0, peak, candidate.kernels, seconds)
        return (1, seconds, peak, candidate.kernels)

    return tuple(sorted(candidates, key=order))


@cache
def _compiled(
    strategy: Strategy, causal: bool, backward: bool
) -> Callable[..., tuple[float, float, float, float]]:
    """(seconds, exposed, peak bytes, kernels) as a function of the model's symbols."""
    of = _MODELS[strategy]
    seconds = of.forward_seconds(causal)
    exposed = of.exposed_seconds(causal, False)
    peak = of.peak_extra_bytes(causal, False)
    if backward:
        seconds += of.backward_seconds(causal)
        exposed += of.exposed_seconds(causal, True)
        peak = sympy.Max(peak, of.peak_extra_bytes(causal, True))
    results = (seconds, exposed, peak, of.kernels(causal))
    function: Callable[..., tuple[float, float, float, float]]
    function = sympy.lambdify(model.SYMBOLS, results, "math", cse=True)
    return function
