"""Prove, call by call, that blocks are the same function of their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from .borders import best_offset, bytes_of, source
from .call_sequence import LEAST_BLOCKS
from .repeats import RepeatedRun
from .signatures import is_waited_for, signature

Block = tuple[fx.Node, ...]

_MORE = 16  # the part of a block's results that a few blocks may have in addition


@dataclass(frozen=True)
class Blocks:
    """Blocks in a row. The i-th call of each is the same, of corresponding operands.

    read: which calls of a block are read outside of it.
    """

    blocks: tuple[Block, ...]
    read: tuple[int, ...]

    def copied(self, copies: dict[fx.Node, fx.Node]) -> Blocks:
        """Return the same blocks in a copy of the graph."""
        blocks = tuple(tuple(copies[x] for x in block) for block in self.blocks)
        return Blocks(blocks, self.read)


def blocks_of(
    calls: Sequence[fx.Node],
    final: Mapping[fx.Node, list[fx.Node]],
    repeat: RepeatedRun,
) -> Blocks | None:
    """Return the longest row of equal blocks in `repeat`; None if too few are equal.

    final: see Sequence; blocks get the final calls that all of them have.
    """
    start = repeat.start + best_offset(calls, repeat)
    every: list[Block] = [
        tuple(calls[start + k * repeat.period :][: repeat.period])
        for k in range(repeat.count)
    ]
    return _equal(_completed(every, final)) or _equal(every)


def _completed(
    blocks: list[Block], final: Mapping[fx.Node, list[fx.Node]]
) -> list[Block]:
    """Return the blocks with the final calls that all of them have."""
    complete: list[list[fx.Node]] = [[] for _ in blocks]
    for calls in zip(*blocks, strict=True):
        followers = [{signature(x): x for x in final.get(node, ())} for node in calls]
        for new, node in zip(complete, calls, strict=True):
            new.append(node)
        for key in followers[0]:
            if key is not None and all(key in each for each in followers):
                for new, each in zip(complete, followers, strict=True):
                    new.append(each[key])
    return list(map(tuple, complete))


def _equal(every: list[Block]) -> Blocks | None:
    forms = [_form(block) for block in every]
    first, last = _longest(forms)
    every = every[first:last]
    read = [_read(block) for block in every]
    counts = Counter(i for indices in read for i in indices)
    # What few blocks hand out, as the values of one layer that a model returns, would
    # have to be kept by all others too.
    usual = {i for i, n in counts.items() if 2 * n >= len(every)}
    limit = sum(bytes_of(every[0][i]) for i in usual) / _MORE if every else 0
    more = [sum(bytes_of(every[0][i]) for i in indices - usual) for indices in read]
    first, last = _longest([n <= limit or None for n in more])
    every = every[first:last]
    if len(every) < LEAST_BLOCKS:
        return None
    return Blocks(tuple(every), tuple(sorted(set().union(*read[first:last]))))


def _longest(forms: Sequence[Hashable]) -> tuple[int, int]:
    """Return begin and end of the longest row of equal forms that are not None."""
    best = begin = 0, 0
    for i, form in enumerate(forms):
        same = i > 0 and form == forms[i - 1]
        begin = begin if same else (i, i)
        if form is not None and i + 1 - begin[0] > best[1] - best[0]:
            best = begin[0], i + 1
    return best


def _form(block: Block) -> Hashable | None:
    """Return which operands are results of which calls of the block.

    None if the block cannot be a function. What comes from outside must be a size, or a
    tensor that is there, and what leaves must be one that can be made of such a tensor.
    """
    place = {node: i for i, node in enumerate(block)}
    inner = []
    for node in block:
        for operand in operands_of(node):
            if operand not in place and not (_can_pass(operand) or _is_size(operand)):
                return None
            inner.append(place.get(operand, -1))
    for i in _read(block):
        chain = views_to(block[i], set(block))
        if not _can_pass(block[i]) or any(map(_has_several, chain)):
            return None
    return tuple(inner)


def views_to(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Return the views inside by which `node` is made, first the one of other memory.

    The last is `node`. Empty if `node` has memory of its own.
    """
    chain: list[fx.Node] = []
    while node in inside and (operand := source(node)) is not None:
        chain.append(node)
        node = operand
    return chain[::-1]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a call in order, each as often as it is used.

    Those of keywords are in the order of the keywords' names.
    """
    operands: list[fx.Node] = []

    def note(x: fx.Node) -> Any:
        operands.append(x)
        return x

    fx.node.map_arg(arguments_of(node), note)
    return operands


def arguments_of(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """Return args and kwargs of a call, the latter sorted by name."""
    return node.args, dict(sorted(node.kwargs.items()))


def _can_pass(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and is_waited_for(node)


def _has_several(view: fx.Node) -> bool:
    """Tell whether a view reads other tensors than the one that it is a view of."""
    return sum(not _is_size(x) for x in operands_of(view)) > 1


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _read(block: Block) -> frozenset[int]:
    inside = set(block)
    return frozenset(
        i for i, node in enumerate(block) if any(x not in inside for x in node.users)
    )
