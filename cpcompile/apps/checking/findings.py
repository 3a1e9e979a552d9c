"""Say what of a step costs more than it has to, by what it costs.

A cost is the time that a rank would save, as the profile of the machine predicts it:
repeated products at the rate of attention without a mask, bytes at that of collectives.
Latencies are left out, which only short sequences feel. It orders what is found, and is
no prediction of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cpcompile.accounting.graph_account import (
    Account,
    Exchange,
    GraphDirection,
    Kind,
    Line,
    LineWork,
    Purpose,
    grouped,
)
from cpcompile.apps.checking.fake_step import FakeStep
from cpcompile.cost.hardware.links import Group, all_gather, all_to_all
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans.tables import milliseconds
from cpcompile.reporting.graph_report import GraphReport, account_of
from cpcompile.reporting.lost_parallelism import AFTER_BREAK
from cpcompile.reporting.ways_out import CALL_IT, MEBIBYTE, NAME_IT, REORDERED, place_of

LEAST_SHARE = 0.05  # of the step; what costs less is not worth a word
_WHOLE = (
    "what it reads is whole on every rank: gathered, or of an input that carries "
    f"tokens and is not sharded, which {NAME_IT} names"
)
_RETURN_LESS = (
    'return only what you need, or name it: cpcompile.config.outputs = ["loss"]; '
    "gather_outputs_megabytes = 0 leaves results sharded"
)


@dataclass(frozen=True)
class Finding:
    """Something that costs more than it has to.

    what: with its place. fix: what to do about it.
    seconds: that a rank would save in a step. share: of the predicted step, 0 to 1.
    """

    what: str
    fix: str
    seconds: float
    share: float

    def __str__(self) -> str:
        cost = f"{milliseconds(self.seconds)} ms, {self.share:.0%} of the step"
        return f"{self.what}: {cost}; {self.fix}"


@dataclass(frozen=True)
class Prices:
    """What work and messages cost on a machine.

    itemsize: bytes of an element of the parameters.
    """

    profile: HardwareProfile
    ranks: int
    itemsize: int

    def work(self, flops: float) -> float:
        """Return the seconds of so many operations of one rank."""
        speed = self.profile.speed(self.itemsize)
        return flops / (self.profile.forward_flops_per_second * speed)

    def repeated(self, lines: Iterable[LineWork]) -> float:
        """Return the seconds of a rank beyond an even share of the work."""
        flops = sum(x.repeated_flops(self.ranks) for x in lines)
        return self.work(flops / self.ranks)

    def exchanged(self, exchanges: Iterable[Exchange]) -> float:
        """Return the seconds that the bytes of messages take, one after another."""
        group, rate = Group(self.ranks), self.profile.collective_bytes_per_second
        _, gathered = all_gather(self.profile, group, rate)
        _, exchanged = all_to_all(self.profile, group)
        return sum(
            x.bytes / float(exchanged if x.kind is Kind.ALL_TO_ALL else gathered)
            for x in exchanges
        )


def findings_of(
    step: FakeStep, prices: Prices, named: bool = False
) -> tuple[Finding, ...]:
    """Return what costs more than it has to, the most expensive first.

    named: whether the user has named the inputs to shard.
    """
    account = account_of(step.graphs)
    seconds = prices.work(account.work().flops) + prices.exchanged(account.exchanges())
    findings = [
        Finding(what, fix, cost, cost / seconds)
        for what, fix, cost in _costs(step, prices, named)
        if cost >= LEAST_SHARE * seconds > 0
    ]
    return tuple(sorted(findings, key=lambda x: -x.seconds))


def _costs(
    step: FakeStep, prices: Prices, named: bool
) -> Iterator[tuple[str, str, float]]:
    """Yield what costs something, what to do, and the seconds."""
    graphs, breaks = step.graphs, step.breaks
    # What shares nothing but attention, because of a break.
    alone = [
        x
        for x in graphs
        if breaks and (x.frame.startswith(AFTER_BREAK) or not x.distributed_calls)
    ]
    others = [x for x in graphs if x not in alone]
    account, reasons = account_of(others), _reasons(others)
    repeated = account.work().repeated
    # Results of a graph before a break cross it; those of the last leave the model.
    leaving = graphs[-1:] if breaks else graphs
    if breaks:
        more = f" (and {len(breaks) - 1} more)" if len(breaks) > 1 else ""
        crossing = account_of(graphs[:-1]).exchanges(Purpose.RESULT)
        cost = prices.exchanged(crossing)
        cost += prices.repeated(account_of(alone).work().repeated)
        what = f"graph break at {breaks[0].place}{more}, {breaks[0].reason}"
        yield what, breaks[0].fix, cost
    if not any(graph.distributed_calls for graph in others):
        fix = f"name the input that carries tokens, and its dimension: {NAME_IT}"
        fix = "see the warnings above" if named else fix
        what = "every rank computes all of it, for nothing is shared out"
        yield what, fix, prices.repeated(repeated)
    else:
        for row in repeated:
            what = f"every rank repeats work at {place_of(row)}"
            yield what, reasons.get(row.what, _WHOLE), prices.repeated([row])
        for rows in _by_module(account):
            what = f"{_size(rows)} gathered at {place_of(rows[0])}"
            yield what, reasons.get(rows[0].what, REORDERED), prices.exchanged(rows)
    if results := account_of(leaving).exchanges(Purpose.RESULT):
        places = list(dict.fromkeys(map(place_of, results)))
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        what = (
            f"results leave the model whole, {_size(results)} on every rank, made at "
            f"{places[0]}{more}"
        )
        yield what, _RETURN_LESS, prices.exchanged(results)


def _size(exchanges: Iterable[Exchange]) -> str:
    return f"{sum(x.bytes for x in exchanges) / MEBIBYTE:.3f} MiB"


def _by_module(account: Account) -> list[list[Exchange]]:
    """Return the values that each module gathers, the largest exchange first."""
    values = account.exchanges(Purpose.VALUE)
    # As in the forward, which meets the first layer first.
    forward_first = sorted(values, key=lambda x: x.direction is GraphDirection.BACKWARD)
    modules: dict[Line, str] = {}
    for x in forward_first:
        modules.setdefault(x.line, x.what)
    return grouped((replace(x, what=modules[x.line]) for x in values), lambda x: x.what)


def _reasons(graphs: Sequence[GraphReport]) -> dict[str, str]:
    """Return why attention of a module is not shared out, and what to do."""
    calls = [(x.path, x.reason) for graph in graphs for x in graph.calls if x.reason]
    by_hand = [
        (x.path, f"attention there is written by hand, and {x.reason}; {CALL_IT}")
        for graph in graphs
        for x in graph.by_hand
        if x.form != "batch"
    ]
    return dict(calls + by_hand)
