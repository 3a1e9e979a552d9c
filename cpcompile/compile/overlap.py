"""Keep the order of messages in what Inductor compiles, and prove that they overlap.

Inductor orders nodes by their data and by the memory they need, and keeps only what it
knows as collectives in the order of the graph. Where shards are uneven, sizes and so
the order differ from rank to rank; an attention operator that moves past an all-reduce
on one rank only is a deadlock. So operators that communicate are made known as
collectives, and so are calls of functions that contain one. (Steps do not communicate,
and shifts are lowered as collectives.)

What Inductor wrote is read, not the graph it wrote it from: the lines that start a
shift, launch a step, and wait for a shift. Every shift must be followed by a step and
only then by its wait, unless it says that there is no step to hide it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.fx as fx

# The order of the scheduler, asked nowhere else; seen in 2.13, probed in
# inductor_compat.py.
from torch._inductor import comms, ir
from torch._inductor.scheduler import BaseSchedulerNode

from cpcompile.errors import RingOverlapError
from cpcompile.ops.comm.communicating import communicates
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


@functools.cache
def keep_order() -> None:
    """Let Inductor's ordering of collectives include the cp:: operators."""
    original = comms.contains_collective
    answers: WeakKeyDictionary[BaseSchedulerNode, bool] = WeakKeyDictionary()

    @functools.wraps(original)
    def contains_collective(
        snode: BaseSchedulerNode, *args: Any, **kwargs: Any
    ) -> bool:
        # Asked for again and again, of each node in reach of each collective.
        if args or kwargs:  # which collective
            return _communicates(snode) or original(snode, *args, **kwargs)
        if snode not in answers:
            answers[snode] = _communicates(snode) or original(snode)
        return answers[snode]

    comms.contains_collective = contains_collective


def _communicates(snode: BaseSchedulerNode) -> bool:
    if isinstance(snode.node, ir.InvokeSubgraph):  # repeated blocks, or a tile
        subgraph = snode.node.subgraph
        assert subgraph is not None, "a call has a function"
        return any(map(_exchanges, subgraph.graph_module.graph.nodes))
    op = getattr(snode.node, "op_overload", None)
    return isinstance(snode.node, ir.FallbackKernel) and communicates(op)


def _exchanges(node: fx.Node) -> bool:
    """Tell whether a call in a function exchanges messages, by us or by torch."""
    is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_collective or communicates(node.target)
