"""What `cp.check` finds: for people, for programs and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from cpcompile.accounting.graph_account import (
    Exchange,
    GraphAccount,
    GraphDirection,
    Purpose,
)
from cpcompile.apps.checking.findings import Finding
from cpcompile.apps.checking.longest_sequence import LongestSequence
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.plain_data import to_json
from cpcompile.cost.plans.tables import text_table
from cpcompile.reporting.account_lines import MEBIBYTE
from cpcompile.reporting.explanation import Explanation

_GATHERED = (Purpose.VALUE, Purpose.RESULT)
_LEAST = 1024  # bytes; less is not worth a row
_ROWS = 8  # of what is gathered, and of calls that are not shared out
_NAMES = 12  # columns of the names of rows
_WIDTH = 88  # columns in which sentences are broken


@dataclass(frozen=True)
class AttentionShare:
    """One attention call. path: its module.

    form: strategy and layout, such as "ring zigzag"; of attention by hand "rows" if a
        rank computes its own queries, and "batch" if it computes its own entries of the
        batch, such as windows, or its own heads; None if every rank computes all.
    reason: why it is not shared out, or by hand.
    """

    path: str
    form: str | None
    reason: str | None = None


@dataclass(frozen=True)
class GraphBreakPlace:
    """A place where a graph of Dynamo ends. fix: the way out, if one is known."""

    place: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Check:
    """What several ranks would do with one call of a model; print it.

    model: the name of its class. ranks: that share the sequence.
    train: whether the backward is counted, too.
    options: of the backend, in words. hardware: the profile by which costs are known.
    attention: every attention call. mixers: what mixes tokens and is no attention.
    explanation: everything by call and by line, as of `cp.explain`.
    breaks: breaks of the graph. warnings: what a run warns of.
    refused: what a run raises unless options["strict"] is False; None if it runs.
    longest: how long a sequence fits; None where this cannot be said.
    saved_per_token: bytes that a rank saves for the backward per token of its own;
        None where these do not grow with the tokens alone.
    unknown: what is not in these numbers.
    findings: what costs more than it has to, the most expensive first.
    next: the one thing to do next.
    seconds: that the check took.
    """

    model: str
    ranks: int
    train: bool
    options: str
    hardware: str
    attention: tuple[AttentionShare, ...]
    mixers: tuple[MixerPlan, ...]
    explanation: Explanation
    breaks: tuple[GraphBreakPlace, ...]
    warnings: tuple[str, ...]
    refused: str | None
    longest: LongestSequence | None
    saved_per_token: float | None
    unknown: tuple[str, ...]
    findings: tuple[Finding, ...]
    next: str
    seconds: float

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 if a run raises an error, else 0."""
        return 0 if self.refused is None else 1

    @property
    def accounts(self) -> tuple[GraphAccount, ...]:
        """The accounts of all graphs."""
        return tuple(x for graph in self.explanation.graphs for x in graph.accounts)

    @property
    def work_ratio(self) -> float:
        """Operations of a rank times the ranks, over one device's: 1 if all is shared.

        Products, convolutions and attention count, forward and backward.
        """
        return self.explanation.work_ratio()

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank in this call."""
        return sum(account.work.flops for account in self.accounts)

    @property
    def gathered(self) -> tuple[Exchange, ...]:
        """What calls of the program, or its results, gather; the largest first."""
        return tuple(x for x in self.explanation.exchanges if x.purpose in _GATHERED)

    def received(self, *purposes: Purpose) -> int:
        """Return the bytes that a rank receives for these purposes, or for all."""
        return sum(
            x.bytes
            for x in self.explanation.exchanges
            if not purposes or x.purpose in purposes
        )

    def to_json(self) -> str:
        """Return all of it as JSON; see cost.plain_data."""
        return to_json(self)

    def __str__(self) -> str:
        what = "forward and backward" if self.train else "forward"
        title = f"{self.model} on {self.ranks} ranks, {what}"
        lines = [f"{title} ({self.options}; predicted for {self.hardware})", ""]
        lines += _row("attention", [self._attention(), *self._not_shared()])
        lines += _row("mixers", self._mixers()) if self.mixers else []
        lines += _row("inputs", [self._inputs()])
        lines += _row("work", [self._work()])
        lines += _row("received", [self._received()])
        lines += _row("gathered", self._gathered(), breaks=False)
        lines += _row("graph", self._breaks())
        lines += _row("fits", self._fits()) if self.train else []
        lines += _row("not counted", list(self.unknown)) if self.unknown else []
        if self.refused is not None:
            lines += _row("refused", [self.refused])
        lines += _row("warnings", list(self.warnings)) if self.warnings else []
        if len(self.findings) > 1:
            lines += _row("then", [str(x) for x in self.findings[1:_ROWS]])
        lines += ["", *_broken(self.next, "NEXT: ", " " * len("NEXT: "))]
        return "\n".join(lines)

    def _attention(self) -> str:
        if not self.attention:
            return "none"
        forms = [x.form for x in self.attention if x.form is not None]
        counts = [f"{forms.count(x)} {x}" for x in dict.fromkeys(forms)]
        listed = f": {', '.join(counts)}" if counts else ""
        return f"{len(forms)} of {len(self.attention)} calls shared out{listed}"

    def _not_shared(self) -> list[str]:
        others = [x for x in self.attention if x.form in (None, "rows")]
        lines = [
            f"{'by rows' if x.form else 'not shared out'}: {x.path}: {x.reason}"
            for x in others
        ]
        return _some(lines)

    def _mixers(self) -> list[str]:
        shared = [x for x in self.mixers if x.strategy is not MixerStrategy.GATHER]
        names = [x.strategy.value for x in shared]
        counts = [f"{names.count(x)} {x}" for x in dict.fromkeys(names)]
        listed = f": {', '.join(counts)}" if counts else ""
        first = f"{len(shared)} of {len(self.mixers)} calls shared out{listed}"
        others = [x for x in self.mixers if x.strategy is MixerStrategy.GATHER]
        lines = [f"on gathered tokens: {x.name} at {x.path}" for x in others]
        return [first, *_some(lines)]

    def _inputs(self) -> str:
        graphs = self.explanation.graphs
        inputs = [str(x) for graph in graphs for x in graph.inputs]
        inputs += [f"tokens begin at {x}" for graph in graphs for x in graph.began]
        return ", ".join(dict.fromkeys(inputs)) or "none carries the sequence"

    def _work(self) -> str:
        if not self.flops:
            return "no product, convolution or attention is counted"
        ratio = self.explanation.work_ratio
        parts = [
            f"{ratio(direction):.2f} in the {direction.value}"
            for direction in GraphDirection
            if any(x.direction is direction for x in self.accounts)
        ]
        return (
            f"all ranks do {self.work_ratio:.2f} times that of one device "
            f"({', '.join(parts)}); {_operations(self.flops)} per rank"
        )

    def _received(self) -> str:
        sizes = {purpose: self.received(purpose) for purpose in Purpose}
        parts = [
            f"{purpose.value} {size / MEBIBYTE:.3f}"
            for purpose, size in sorted(sizes.items(), key=lambda x: -x[1])
            if size
        ]
        if not parts:
            return "nothing"
        return f"{self.received() / MEBIBYTE:.3f} MiB per rank: {', '.join(parts)}"

    def _gathered(self) -> list[str]:
        rows = [
            (
                f"{x.bytes / MEBIBYTE:.3f} MiB",
                x.direction.value,
                x.purpose.value,
                x.what + (f" ({x.calls} calls)" if x.calls > 1 else ""),
                str(x.line),
            )
            for x in self.gathered
            if x.bytes >= _LEAST
        ]
        if not rows:
            return ["nothing of a KiB or more"]
        return _some(text_table(rows, indent="").splitlines())

    def _breaks(self) -> list[str]:
        count = len(self.explanation.graphs)
        if not self.breaks:
            return [f"{count} {'graphs' if count != 1 else 'graph'}, no break"]
        many = len(self.breaks) > 1
        lines = [f"{count} graphs, {len(self.breaks)} {'breaks' if many else 'break'}"]
        return lines + [f"{x.place}: {x.reason}; {x.fix}" for x in self.breaks]

    def _fits(self) -> list[str]:
        if self.longest is not None:
            return [str(self.longest)]
        if self.saved_per_token is None:
            forms = {x.form for x in self.attention}
            by_hand = not forms.isdisjoint((None, "rows", "batch"))
            why = "attention by hand may save weights of all pairs"
            other = "its inputs do not say how long one sequence is"
            return [f"cannot be said: {why if by_hand else other}"]
        size = f"{self.saved_per_token / 1024:.1f} KiB"
        return [
            f"the forward saves {size} per token of a rank; --memory 80G (memory=80e9) "
            "says how long a sequence fits"
        ]


def _row(name: str, texts: Iterable[str], breaks: bool = True) -> list[str]:
    """Return lines of a table with the name in front of the first.

    breaks: whether long texts become several lines.
    """
    lines: list[str] = []
    indent = " " * len(f"  {'':{_NAMES}} ")
    for text in texts:
        begin = indent if lines else f"  {name:{_NAMES}} "
        lines += _broken(text, begin, indent) if breaks else [begin + text]
    return lines


def _broken(text: str, begin: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _ROWS
    return [*lines[:_ROWS], f"and {more} more"] if more > 0 else lines


def _operations(flops: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"
