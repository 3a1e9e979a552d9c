"""Turn a setting into whether, and with whom, blocks are folded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.ranks.agreement import all_equal
from cpcompile.settings import setting

from .fold_repeated_blocks import FoldedBlocks


@dataclass(frozen=True)
class Folding:
    """The input of folding in addition to the graph.

    agree: tells whether all ranks say the same text; called by all of them as often.
    found: gets what has been folded, of the forward and of the backward.
    """

    agree: Callable[[str], bool]
    found: list[FoldedBlocks] = field(default_factory=list)


def folding_of(group: ProcessGroup, doing: str) -> Folding | None:
    """Return the folding with the ranks of `group`; None if blocks stay as they are."""
    if not setting("fold_repeated_blocks"):
        return None
    return Folding(lambda text: all_equal(group, text, doing))
