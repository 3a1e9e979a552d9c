"""What `cp.check` finds: for people, for programs and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cpcompile.accounting.graph_account import Exchange, GraphDirection, Purpose
from cpcompile.apps.checking.findings import Finding
from cpcompile.apps.checking.longest_sequence import LongestSequence
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.plain_data import to_json
from cpcompile.reporting.explanation import Explanation, exchange_table
from cpcompile.reporting.graph_report import AttentionShare
from cpcompile.reporting.ways_out import MEBIBYTE, GraphBreakPlace

_LEAST = 1024  # bytes; less is not worth a row
_ROWS = 8  # of what is gathered, and of calls that are not shared out
_NAMES = 12  # columns of the names of rows
_WIDTH = 88  # columns in which sentences are broken
_NEXT = "NEXT: "


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
    def work_ratio(self) -> float:
        """Operations of a rank times the ranks, over one device's: 1 if all is shared.

        Products, convolutions and attention count, forward and backward.
        """
        return self.explanation.work_ratio()

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank in this call."""
        return self.explanation.account.work().flops

    @property
    def gathered(self) -> tuple[Exchange, ...]:
        """What calls of the program, or its results, gather; the largest first."""
        return tuple(self.explanation.account.exchanges(Purpose.VALUE, Purpose.RESULT))

    def to_json(self) -> str:
        """Return all of it as JSON; see cost.plain_data."""
        return to_json(self)

    def __str__(self) -> str:
        what = "forward and backward" if self.train else "forward"
        title = f"{self.model} on {self.ranks} ranks, {what}"
        lines = [f"{title} ({self.options}; predicted for {self.hardware})", ""]
        rows = {
            "attention": self._attention(),
            "mixers": self._mixers(),
            "inputs": self._inputs(),
            "work": self._work(),
            "received": self._received(),
            "gathered": self._gathered(),
            "graph": self._breaks(),
            "fits": self._fits(),
            "not counted": self.unknown,
            "refused": [] if self.refused is None else [self.refused],
            "warnings": self.warnings,
            "then": [str(x) for x in self.findings[1:_ROWS]],
        }
        for name, texts in rows.items():
            begins = [name] + [""] * len(texts)
            for begin, text in zip(begins, texts, strict=False):
                begin = f"  {begin:{_NAMES}} "
                # The columns of a table stay as they are.
                wraps = name != "gathered"
                lines += _broken(text, begin) if wraps else [begin + text]
        return "\n".join([*lines, "", *_broken(self.next, _NEXT)])

    def _attention(self) -> list[str]:
        if not self.attention:
            return ["none"]
        return _shared(
            [x.form for x in self.attention],
            [
                f"{'by rows' if x.form else 'not shared out'}: {x.path}: {x.reason}"
                for x in self.attention
                if x.form in (None, "rows")
            ],
        )

    def _mixers(self) -> list[str]:
        gathered = [x for x in self.mixers if x.strategy is MixerStrategy.GATHER]
        forms = [None if x in gathered else x.strategy.value for x in self.mixers]
        others = [f"on gathered tokens: {x.name} at {x.path}" for x in gathered]
        return _shared(forms, others) if self.mixers else []

    def _inputs(self) -> list[str]:
        graphs = self.explanation.graphs
        inputs = [str(x) for graph in graphs for x in graph.inputs]
        inputs += [f"tokens begin at {x}" for graph in graphs for x in graph.began]
        return [", ".join(dict.fromkeys(inputs)) or "none carries the sequence"]

    def _work(self) -> list[str]:
        if not self.flops:
            return ["no product, convolution or attention is counted"]
        parts = [
            f"{self.explanation.work_ratio(x):.2f} in the {x.value}"
            for x in GraphDirection
            if any(x is graph.direction for graph in self.explanation.account.graphs)
        ]
        return [
            f"all ranks do {self.work_ratio:.2f} times that of one device "
            f"({', '.join(parts)}); {_operations(self.flops)} per rank"
        ]

    def _received(self) -> list[str]:
        account = self.explanation.account
        sizes = {x: account.received(x) for x in Purpose if account.received(x)}
        parts = [
            f"{purpose.value} {size / MEBIBYTE:.3f}"
            for purpose, size in sorted(sizes.items(), key=lambda x: -x[1])
        ]
        if not parts:
            return ["nothing"]
        whole = account.received() / MEBIBYTE
        return [f"{whole:.3f} MiB per rank: {', '.join(parts)}"]

    def _gathered(self) -> list[str]:
        rows = [x for x in self.gathered if x.bytes >= _LEAST]
        return exchange_table(rows, _ROWS) or ["nothing of a KiB or more"]

    def _breaks(self) -> list[str]:
        graphs = _many(len(self.explanation.graphs), "graph")
        if not self.breaks:
            return [f"{graphs}, no break"]
        lines = [f"{x.place}: {x.reason}; {x.fix}" for x in self.breaks]
        return [f"{graphs}, {_many(len(lines), 'break')}", *lines]

    def _fits(self) -> list[str]:
        if not self.train:
            return []
        if self.longest is not None:
            return [str(self.longest)]
        if self.saved_per_token is None:
            by_hand = {x.form for x in self.attention} & {None, "rows", "batch"}
            why = "attention by hand may save weights of all pairs"
            other = "its inputs do not say how long one sequence is"
            return [f"cannot be said: {why if by_hand else other}"]
        size = f"{self.saved_per_token / 1024:.1f} KiB"
        return [
            f"the forward saves {size} per token of a rank; --memory 80G (memory=80e9) "
            "says how long a sequence fits"
        ]


def _shared(forms: Sequence[str | None], others: list[str]) -> list[str]:
    """Say how many calls are shared out and how, and which others there are."""
    names = [x for x in forms if x is not None]
    counts = ", ".join(f"{names.count(x)} {x}" for x in dict.fromkeys(names))
    shared = f"{len(names)} of {len(forms)} calls shared out"
    return [f"{shared}: {counts}" if counts else shared, *_some(others)]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _broken(text: str, begin: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
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
