"""Say where the time of a step goes on one rank, from what torch.profiler recorded.

Every moment of the main thread belongs to the innermost known call around it. What is
in no known call is token-wise work: kernels that Inductor has fused, and Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ATTENTION, PRODUCTS, REST = "attention", "matrix products", "other token-wise work"
OPTIMIZER, REDUCTION, WAITS = "optimizer", "gradient reduction", "waits for messages"
SHARES = (ATTENTION, PRODUCTS, REST, OPTIMIZER, REDUCTION, WAITS)

# The first share with a name that fits. Messages of attention are waits; messages
# outside of it sum up gradients.
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        ATTENTION,
        (
            "cp::ring_attention",
            "cp::all_gather_attention",
            "cp::ulysses_attention",
            "cp::hybrid_attention",
            "cp::split_kv_attention",
            "cp::attention_step",
            "aten::_scaled_dot_product",
        ),
    ),
    (WAITS, ("cp::ring_", "cp::ulysses_", "cp::relayout")),
    (REDUCTION, ("_c10d_functional::", "c10d::")),
    (PRODUCTS, ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::")),
    (OPTIMIZER, ("Optimizer.step#",)),
)
WHOLE = "step of tools.bench"  # the name of what is recorded
_INSIDE = {  # what a share becomes inside of another
    (ATTENTION, REDUCTION): WAITS,
    (ATTENTION, PRODUCTS): ATTENTION,
    (WAITS, REDUCTION): WAITS,
}


@dataclass(frozen=True)
class Call:
    """A call that was recorded on the main thread; times in nanoseconds."""

    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        """Time at which it was over."""
        return self.start + self.duration


def recorded(step: Callable[[], object]) -> list[Call]:
    """Record what the main thread of this process calls in a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        torch.profiler.record_function(WHOLE),
    ):
        step()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = results.events()
    (thread,) = {x.start_thread_id() for x in events if x.name() == WHOLE}
    return [
        Call(x.name(), x.start_ns(), x.duration_ns())
        for x in events
        if x.start_thread_id() == thread
    ]


def shares(calls: Sequence[Call]) -> dict[str, float]:
    """Return the seconds of each of SHARES; together they are those of the step."""
    seconds = dict.fromkeys(SHARES, 0.0)
    (whole,) = [x for x in calls if x.name == WHOLE]
    inside = [x for x in calls if whole.start <= x.start and x.end <= whole.end]
    stack: list[tuple[Call, str]] = []
    now = whole.start

    def until(time: int) -> None:
        nonlocal now
        seconds[stack[-1][1] if stack else REST] += max(time - now, 0) / 1e9
        now = max(time, now)

    for call in sorted(inside, key=lambda x: (x.start, -x.duration)):
        while stack and stack[-1][0].end <= call.start:
            until(stack[-1][0].end)
            stack.pop()
        until(call.start)
        outer = stack[-1][1] if stack else REST
        stack.append((call, _share(call.name, outer)))
    while stack:
        until(stack[-1][0].end)
        stack.pop()
    return seconds


def _share(name: str, outer: str) -> str:
    found = next((share for share, names in _NAMES if name.startswith(names)), outer)
    return _INSIDE.get((outer, found), found)


def mean(ranks: Iterable[dict[str, float]]) -> dict[str, float]:
    """Average the shares over the ranks, one by one."""
    found = list(ranks)
    return {name: sum(x[name] for x in found) / len(found) for name in SHARES}
