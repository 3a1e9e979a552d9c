"""Make one function of blocks that repeat, so that it is compiled once.

    a = mm(x, w_1)                   block(x, w) = add(x, relu(mm(x, w)))
    x_1 = add(x, relu(a))       ->   x_1 = invoke_subgraph(block, x, w_1)
    b = mm(x_1, w_2)                 x_2 = invoke_subgraph(block, x_1, w_2)
    x_2 = add(x_1, relu(b))          ...
    ...

The pass works on the forward and on the backward graph that AOTAutograd has made for
Inductor, in which the layers of a model are calls of aten in the order of execution.
It knows no modules and no names: what repeats in that order, call by call with the same
constants, dtypes, shapes and strides, and with the same results for operands, is one
function. What differs between blocks (weights, what the forward has saved, seeds) is an
operand of it. See Note [Blocks and their borders].

Note [Blocks and their borders]

- A block may begin anywhere in a layer. It begins where nothing is lost that Inductor
  would fuse, as before a matrix product, and where few values cross.
- A function must not return memory of its operands, nor of another result: views are
  made again outside, of a result that is no view.
- Gradients leave through collectives that Inductor joins over the whole graph; these
  stay outside. A collective whose result the block goes on with is inside.
- What writes to memory or draws random numbers by itself is never inside. Inductor
  makes random numbers of seeds, which are operands.
- All ranks have to fold the same blocks: collectives that leave a block stand after
  it, and so the order of messages depends on what is folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from ...graph.graph_pass import graph_pass
from ...graph.nodes import sort_calls
from .block_functions import insert_calls
from .borders import is_opaque
from .call_sequence import LEAST_BLOCKS, CallSequence, sequence_of
from .repeated_blocks import Blocks, blocks_of
from .repeats import repeats

_LEAST_CALLS = 16  # of a block; a smaller one is compiled in no time
_TRIES = 8  # periods of one stretch


@dataclass(frozen=True)
class FoldedBlocks:
    """A row of blocks that is one function: how many, and of how many calls each."""

    count: int
    calls: int

    @classmethod
    def of(cls, row: Blocks) -> FoldedBlocks:
        return cls(len(row.blocks), len(row.blocks[0]))

    def __str__(self) -> str:
        return f"{self.count} blocks of {self.calls} calls compiled once"


@graph_pass()
def fold_repeated_blocks(graph: fx.Graph, rows: list[Blocks]) -> int:
    """Make a function of each row of blocks that is in the graph; return how many."""
    for number, row in enumerate(rows):
        insert_calls(row, f"block_{number}")
    if rows:
        sort_calls(graph)
    return len(rows)


def find_blocks(graph: fx.Graph) -> list[Blocks]:
    """Return rows of equal blocks, in order; the graph stays as it is."""
    sequence = sequence_of(graph)
    return list(_rows(sequence, 0, len(sequence.calls)))


def _rows(sequence: CallSequence, begin: int, end: int) -> Iterator[Blocks]:
    calls, ids = sequence.calls[begin:end], sequence.ids[begin:end]
    for repeat in repeats(ids, LEAST_BLOCKS, _LEAST_CALLS)[:_TRIES]:
        row = blocks_of(calls, sequence.final, repeat)
        if row is None or not any(map(is_opaque, row.blocks[0])):
            continue
        first = begin + calls.index(row.blocks[0][0])
        last = first + len(row.blocks) * repeat.period
        yield from _rows(sequence, begin, first)
        yield row
        yield from _rows(sequence, last, end)
        return
