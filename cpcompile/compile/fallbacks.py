"""Recompile with a fallback for calls whose failure no trial predicted.

A call's backward may meet a gradient in a form that its trial did not try, and only
AOTAutograd sees that. Then the passes run once more on the untouched graph, and compute
that call on gathered tensors. Uneven shards may differ on the ranks, and so may what
they cannot do: what one rank has to gather, all gather, so that all compile the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import TraceError
from cpcompile.ranks.agreement import Attempt, all_gather_text, attempt

T = TypeVar("T")

# Layers repeat, so that as many may fail one after another as there are layers.
MAX_RETRIES = 64


def attempt_with_fallbacks(
    group: ProcessGroup,
    make: Callable[[dict[str, str]], tuple[T, dict[str, str]]],
    final: tuple[type[Exception], ...],
    doing: str,
) -> Attempt[T]:
    """Run `agreement.attempt` as often as it ends with a call that can be gathered.

    Args:
        make: takes the calls to gather, by `name_origin`, with the reason for each.
    """
    gathered: dict[str, str] = {}
    for _ in range(MAX_RETRIES):
        to_gather = dict(gathered)
        tried = attempt(group, lambda: make(to_gather), final, doing)  # noqa: B023
        if tried.problem is None:
            return tried
        new_calls = _of_all_ranks(group, tried.problem, doing)
        if new_calls.keys() <= gathered.keys():
            return tried
        gathered |= new_calls
    return tried


def _of_all_ranks(
    group: ProcessGroup, problem: Exception, doing: str
) -> dict[str, str]:
    mine = {}
    if isinstance(problem, TraceError):
        mine = {problem.call: problem.reason}
    texts = all_gather_text(group, json.dumps(mine), doing)
    return {k: v for text in texts for k, v in json.loads(text).items()}
