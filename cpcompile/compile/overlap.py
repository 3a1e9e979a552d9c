"""Prove in generated code that the messages of a ring overlap with its steps.

What Inductor wrote is read, not the graph it wrote it from: the lines that start a
shift, launch a step, and wait for a shift. Every shift must be followed by a step and
only then by its wait, unless it says that there is no step to hide it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cpcompile.errors import RingOverlapError
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT

_SHIFT = re.compile(
    r"(?P<result>\w+) = torch\.ops\.cp\.ring_shift\.default\("
    r".*'(?P<where>[^']*)'(, None, \d+)?\)"  # and how far
)
_PART = re.compile(r"(?P<part>\w+) = (?P<whole>\w+)\[\d+\]")
_WAIT = re.compile(r"wait_tensor\.default\((?P<tensor>\w+)\)")
# An operator, or a kernel of one of our templates, whose names end in a number.
_STEP = re.compile(
    r"torch\.ops\.cp\.attention_step\w*\.default\(|^\s*triton_tem\w*_attention_step\w*\.run\("
)


@dataclass(frozen=True)
class Shift:
    """One message in the order of the generated code; numbers count its lines."""

    where: str
    started: int
    waited: int | None  # the first wait; None if one of its tensors is not waited for
    steps: tuple[int, ...]  # the steps that are launched in between

    @property
    def is_hidden(self) -> bool:
        """Tell whether it is waited for, and a step runs before, unless none could."""
        needed = 0 if self.where.endswith(NOTHING_TO_HIDE_IT) else 1
        return self.waited is not None and len(self.steps) >= needed


def shifts(code: str) -> tuple[Shift, ...]:
    """Return the ring shifts of a generated module, in the order of their starts."""
    started: dict[str, tuple[str, int]] = {}
    parts: dict[str, str] = {}  # part of a message -> the message
    waits: dict[str, int] = {}  # the same -> the line that waits for it
    steps: list[int] = []
    for number, line in enumerate(code.splitlines()):
        if match := _SHIFT.search(line):
            started[match["result"]] = match["where"], number
        elif (match := _PART.search(line)) and match["whole"] in started:
            parts[match["part"]] = match["whole"]
        elif match := _WAIT.search(line):
            if match["tensor"] in parts:
                waits.setdefault(match["tensor"], number)
        elif _STEP.search(line):
            steps.append(number)
    ring_shifts = []
    for result, (where, start) in started.items():
        own = [part for part, whole in parts.items() if whole == result]
        complete = own and all(part in waits for part in own)
        end = min(waits[part] for part in own) if complete else None
        between = tuple(s for s in steps if start < s and (end is None or s < end))
        ring_shifts.append(Shift(where, start, end, between))
    return tuple(ring_shifts)


def check_overlap(code: str) -> tuple[Shift, ...]:
    """Raise RingOverlapError unless every shift of `code` is hidden; return them."""
    ring_shifts = shifts(code)
    for shift in ring_shifts:
        if not shift.is_hidden:
            happened = (
                "is never waited for, or not all of it"
                if shift.waited is None
                else f"is sent in line {shift.started + 1} and waited for in line "
                f"{shift.waited + 1}, with no attention step in between"
            )
            raise RingOverlapError(
                f"in the generated code the message with {shift.where} {happened}; "
                "needed: shift, step, wait. An option of Inductor that reorders nodes "
                "may be the cause; cpcompile.config.unroll = 0 runs a ring as one "
                "operator"
            )
    return ring_shifts
