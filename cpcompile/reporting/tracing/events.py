"""Read what torch.profiler has recorded on one rank: what happened when, by lanes.

Operators of cpcompile, and torch's collectives, are operators of torch, in looped and
unrolled rings alike; what runs inside of them has the names of `ops.comm.communication.
span`. A message is in flight from its shift to the end of its last wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cpcompile.cost.strategies import STRATEGIES
from cpcompile.ops.comm.communication import SPAN

PROGRAM, ATTENTION, STEPS = "program", "attention", "steps"
SHIFTS, WAITS, GATHERS = "messages in flight", "waits", "gathers and sums"
LANES = (PROGRAM, ATTENTION, STEPS, SHIFTS, WAITS, GATHERS)
FORWARD, BACKWARD = "forward", "backward"

_BACKWARD = "CompiledFunctionBackward"  # AOTAutograd's
_OPERATORS = {f"cp::{row.operator}" for row in STRATEGIES.values()}
_TENSORS = 2  # of a message of a ring: keys and values, or their gradients
_STEP_OPERATORS = "cp::attention_step"
_GATHERS = ("_c10d_functional::", "c10d::", "cp::relayout", "cp::ulysses_")
_WAITS = ("cp::ring_wait", "_c10d_functional::wait_tensor")
_MESSAGES = ("c10d::send", "c10d::recv", "c10d::barrier")
_KNOWN = (SPAN, "cp::", "c10d::", "_c10d_functional::", _BACKWARD)
_STEP = re.compile(r"(.*) of the (forward|backward) of .*, step (\d+)")


@dataclass(frozen=True)
class Event:
    """Something that a rank did; times in microseconds, the start since 1970."""

    lane: str
    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """Time at which it was over."""
        return self.start + self.duration

    def holds(self, other: Event) -> bool:
        """Tell whether the other event begins and ends within this one."""
        return self.start <= other.start and other.end <= self.end


Record = tuple[str, int, int]
"""Name, start and duration in nanoseconds, as torch.profiler has them."""


def events_of(records: Iterable[Record]) -> list[Event]:
    """Return the events of one rank, ordered by their start."""
    recorded = sorted(
        (
            Event("", name, start / 1e3, length / 1e3)
            for name, start, length in records
            if name.startswith(_KNOWN)
        ),
        key=lambda x: (x.start, -x.duration),
    )
    spans = [x for x in recorded if x.name.startswith(SPAN)]
    gathers, messages = _gathers(recorded), _messages(recorded, spans)
    events = [*_program(recorded), *messages, *_steps(recorded, messages)]
    events += [replace(x, lane=ATTENTION) for x in recorded if _is_attention(x)]
    events += _unrolled(events)
    events += _exchanged(events, gathers)
    whole = [x for x in events if x.lane == ATTENTION]
    parts = {x for x in whole if any(o != x and o.holds(x) for o in whole)}
    events = [x for x in events if x not in parts]  # the ring of a hybrid
    return sorted(events + gathers, key=lambda x: (x.start, -x.duration))


def direction(event: Event) -> str:
    """Return the direction of an event of the attention lane, forward or backward."""
    return BACKWARD if BACKWARD in event.name else FORWARD


def _program(recorded: list[Event]) -> Iterator[Event]:
    for x in recorded:
        if x.name.startswith(f"{SPAN}forward of "):
            yield replace(x, lane=PROGRAM, name=x.name.removeprefix(SPAN))
        elif x.name == _BACKWARD:
            yield replace(x, lane=PROGRAM, name="backward")


def _is_attention(x: Event) -> bool:
    return x.name.removesuffix("_backward") in _OPERATORS


def _label(x: Event, spans: list[Event]) -> str:
    """Return what an operator's first inner span says, without rank and group."""
    inside = next((s for s in spans if x.holds(s)), None)
    name = x.name if inside is None else inside.name.removeprefix(SPAN)
    return re.sub(r",? (on )?rank \d+ of \d+ in group .*$", "", name)


def _messages(recorded: list[Event], spans: list[Event]) -> list[Event]:
    """Return waits, and messages from their shift to the last wait for them.

    Inductor waits by torch's own operator, which does not say for what: messages arrive
    in the order in which they leave.
    """
    named = [x for x in recorded if x.name == _WAITS[0]]
    waits = [replace(x, lane=WAITS, name=_label(x, spans)) for x in named]
    other = [
        replace(x, lane=WAITS)
        for x in recorded
        if x.name == _WAITS[1] and not any(w.holds(x) for w in named)
    ]
    shifts = [
        replace(x, lane=SHIFTS, name=_label(x, spans))
        for x in recorded
        if x.name == "cp::ring_shift"
    ]
    for number, shift in enumerate(shifts):
        again = (s.start for s in shifts[number + 1 :] if s.name == shift.name)
        until = next(again, float("inf"))
        ours = [
            w for w in waits if w.name == shift.name and shift.start <= w.start < until
        ]
        if not ours:
            later = [w for w in other if w.start >= shift.end][:_TENSORS]
            other = [w for w in other if w not in later]
            ours = [replace(w, name=shift.name) for w in later]
            waits += ours
        end = max((w.end for w in ours), default=shift.end)
        shifts[number] = replace(shift, duration=end - shift.start)
    return [*shifts, *waits, *other]


def _steps(recorded: list[Event], messages: list[Event]) -> Iterator[Event]:
    """Yield kernels of steps, with the step number of the messages around them."""
    step = 0
    for x in sorted([*recorded, *messages], key=lambda x: x.start):
        said = _STEP.match(x.name) if x.lane in (SHIFTS, WAITS) else None
        if said and said[1] == "keys and values":
            step = int(said[3]) + (x.lane == WAITS)
        elif _is_attention(x):
            step = 0
        elif x.name.startswith(_STEP_OPERATORS):
            name = f"step {step}: {x.name.removeprefix('cp::')}"
            yield replace(x, lane=STEPS, name=name)


def _exchanged(events: list[Event], gathers: list[Event]) -> list[Event]:
    """Return an event for each span from an exchange of heads to the one back."""
    exchanges: list[Event] = []
    whole = [x for x in events if x.lane == ATTENTION]
    program = [x for x in events if x.lane == PROGRAM]
    start: Event | None = None
    groups = 0  # of heads that are on their way, where these are exchanged in groups
    for x in sorted(gathers, key=lambda x: x.start):
        if any(w.holds(x) for w in whole):
            continue
        groups += x.name == "cp::ulysses_scatter_start"
        groups -= x.name == "cp::ulysses_gather_finish"
        if x.name == "cp::ulysses_scatter" or (
            x.name == "cp::ulysses_scatter_start" and start is None
        ):
            start = x
        elif start is not None and (
            x.name == "cp::ulysses_gather"
            or (x.name == "cp::ulysses_gather_finish" and groups <= 0)
        ):
            groups = 0
            inside = (p for p in program if p.holds(start))
            back = any(p.name == BACKWARD for p in inside)
            between = Event(ATTENTION, "", start.start, x.end - start.start)
            is_hybrid = any(between.holds(w) for w in whole)
            name = f"cp::{'hybrid' if is_hybrid else 'ulysses'}_attention"
            exchanges.append(replace(between, name=name + "_backward" * back))
            start = None
    return exchanges


def _unrolled(events: list[Event]) -> Iterator[Event]:
    """Yield an event for each ring that is in the graph: its steps and their waits."""
    whole = [x for x in events if x.lane == ATTENTION]
    rings: list[list[Event]] = []
    for x in sorted(events, key=lambda x: x.start):
        if x.lane not in (STEPS, SHIFTS, WAITS) or any(w.holds(x) for w in whole):
            continue
        said = _STEP.match(x.name)
        if x.lane == SHIFTS and said and said[3] == "0" and said[1] != "dk and dv":
            rings.append([])
        if rings and (x.lane == STEPS or said):
            rings[-1].append(x)
    for ring in rings:
        said = next(filter(None, (_STEP.match(x.name) for x in ring)))
        end = max(x.end for x in ring)
        name = "cp::ring_attention" + "_backward" * (said[2] == BACKWARD)
        yield Event(ATTENTION, f"{name} (unrolled)", ring[0].start, end - ring[0].start)


def _gathers(recorded: list[Event]) -> list[Event]:
    """Return collectives; what a collective calls is not counted again."""
    events: list[Event] = []
    for x in recorded:
        is_gather = x.name.startswith(_GATHERS) and x.name not in _WAITS
        if not is_gather or x.name.startswith(_MESSAGES):
            continue
        if not (events and events[-1].holds(x)):
            events.append(replace(x, lane=GATHERS))
    return events
