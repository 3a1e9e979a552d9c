"""Say what of a step costs more than it has to, by what it costs.

A cost is the time that a rank would save, as the profile of the machine predicts it:
repeated products at the rate of attention without a mask, bytes at that of collectives.
Latencies are left out, which only short sequences feel. It orders what is found, and is
no prediction of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cpcompile.accounting.graph_account import (
    Exchange,
    Kind,
    Line,
    LineWork,
    Purpose,
)
from cpcompile.apps.checking.fake_step import FakeStep
from cpcompile.cost.hardware.links import Group, all_gather, all_to_all
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans.tables import milliseconds
from cpcompile.reporting.account_lines import MEBIBYTE
from cpcompile.reporting.break_texts import place_text, way_out
from cpcompile.reporting.graph_report import GraphReport
from cpcompile.torch_patches.graph_breaks import reason_text

LEAST_SHARE = 0.05  # of the step; what costs less is not worth a word
_NAME_IT = 'options={"shard": {"argument": dim}}'
_AFTER_BREAK = "torch_dynamo_resume_in_"  # Dynamo's name of what follows a break


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
    accounts = [x for graph in step.graphs for x in graph.accounts]
    seconds = prices.work(sum(x.work.flops for x in accounts))
    seconds += prices.exchanged(e for x in accounts for e in x.exchanges)
    # Results of a graph before a break cross it; those of the last leave the model.
    crossing, leaving = _halves(step.graphs, bool(step.breaks))
    alone = tuple(x for x in step.graphs if step.breaks and _is_alone(x))
    others = tuple(x for x in step.graphs if x not in alone)
    costs: list[_Cost] = []
    if step.breaks:
        costs.append(_of_breaks(step, crossing, alone, prices))
    if not any(graph.distributed_calls for graph in others):
        costs.append(_of_nothing(others, prices, named))
    else:
        costs += _of_work(others, step.warnings, prices)
        costs += _of_values(others, prices)
    costs += _of_results(leaving, prices)
    findings = [
        Finding(what, fix, cost, cost / seconds) for what, fix, cost in costs if cost
    ]
    large = [x for x in findings if x.share >= LEAST_SHARE]
    return tuple(sorted(large, key=lambda x: -x.seconds))


_Cost = tuple[str, str, float]
_Graphs = Sequence[GraphReport]


def _halves(graphs: _Graphs, are_broken: bool) -> tuple[_Graphs, _Graphs]:
    return (graphs[:-1], graphs[-1:]) if are_broken else ((), graphs)


def _is_alone(graph: GraphReport) -> bool:
    """Tell whether a graph shares nothing but attention, because of a break."""
    return graph.frame.startswith(_AFTER_BREAK) or not graph.distributed_calls


def _of_breaks(
    step: FakeStep, crossing: _Graphs, alone: _Graphs, prices: Prices
) -> _Cost:
    first, more = step.breaks[0], len(step.breaks) - 1
    others = f" (and {more} more)" if more else ""
    seconds = prices.exchanged(_for(Purpose.RESULT, crossing))
    seconds += prices.repeated(_repeated(alone))
    what = f"graph break at {place_text(first.places)}{others}"
    return (
        f"{what}, {reason_text(first.text)}",
        way_out(first.text, first.places),
        seconds,
    )


def _of_nothing(graphs: _Graphs, prices: Prices, named: bool) -> _Cost:
    fix = f"name the input that carries tokens, and its dimension: {_NAME_IT}"
    if named:
        fix = "see the warnings above"
    what = "every rank computes all of it, for nothing is shared out"
    return what, fix, prices.repeated(_repeated(graphs))


def _of_work(
    graphs: _Graphs, warnings: Sequence[str], prices: Prices
) -> Iterator[_Cost]:
    lines: dict[Line, list[LineWork]] = {}
    for row in _repeated(graphs):
        lines.setdefault(row.line, []).append(row)
    reasons = _reasons(graphs)
    for line, rows in lines.items():
        fix = reasons.get(rows[0].what, _WHOLE)
        if any(_names(text, line) for text in warnings):
            fix = "the warning that names this line says what to do"
        what = f"every rank repeats work at {_place(line, rows[0].what)}"
        yield what, fix, prices.repeated(rows)


def _reasons(graphs: _Graphs) -> dict[str, str]:
    """Return why attention of a module is not shared out, and what to do."""
    calls = [(x.path, x.reason) for graph in graphs for x in graph.calls if x.reason]
    by_hand = [
        (x.path, f"attention there is written by hand, and {x.reason}; {_CALL_IT}")
        for graph in graphs
        for x in graph.by_hand
        if x.form != "batch"
    ]
    return dict(calls + by_hand)


def _of_values(graphs: _Graphs, prices: Prices) -> Iterator[_Cost]:
    named: dict[Line, str] = {}  # as in the forward, which meets the first layer first
    modules: dict[str, list[Exchange]] = {}
    for exchange in _for(Purpose.VALUE, graphs):
        module = named.setdefault(exchange.line, exchange.what)
        modules.setdefault(module, []).append(exchange)
    reasons = _reasons(graphs)
    for module, rows in modules.items():
        largest = max(rows, key=lambda x: x.bytes)
        what = f"{_size(rows)} gathered at {_place(largest.line, module)}"
        yield what, reasons.get(module, _FIXES), prices.exchanged(rows)


def _of_results(graphs: _Graphs, prices: Prices) -> Iterator[_Cost]:
    rows = sorted(_for(Purpose.RESULT, graphs), key=lambda x: -x.bytes)
    if not rows:
        return
    places = list(dict.fromkeys(_place(x.line, x.what) for x in rows))
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    yield (
        f"results leave the model whole, {_size(rows)} on every rank, made at "
        f"{places[0]}{more}",
        'return only what you need, or name it: cpcompile.config.outputs = ["loss"]; '
        "gather_outputs_megabytes = 0 leaves results sharded",
        prices.exchanged(rows),
    )


def _size(exchanges: Iterable[Exchange]) -> str:
    return f"{sum(x.bytes for x in exchanges) / MEBIBYTE:.3f} MiB"


_CALL_IT = "call F.scaled_dot_product_attention"
_WHOLE = (
    "what it reads is whole on every rank: gathered, or of an input that carries "
    f"tokens and is not sharded, which {_NAME_IT} names"
)
_FIXES = (
    "look at this line: what reorders tokens by data, or loops over parts of them, "
    "gathers all of them; mask tokens instead, and call on all tokens at once"
)


def _repeated(graphs: _Graphs) -> list[LineWork]:
    """Return the lines that repeat work, except for what a plan wants."""
    works = [account.work for graph in graphs for account in graph.accounts]
    return [row for work in works for row in work.repeated if not row.planned]


def _for(purpose: Purpose, graphs: _Graphs) -> list[Exchange]:
    accounts = [account for graph in graphs for account in graph.accounts]
    return [x for y in accounts for x in y.exchanges if x.purpose is purpose]


def _place(line: Line, module: str) -> str:
    return str(line) if module == "<top level>" else f"{line} ({module})"


def _names(warning: str, line: Line) -> bool:
    texts = (f"{line.file}:{line.number}", f'File "{line.file}", line {line.number}')
    return bool(line.number) and any(text in warning for text in texts)
