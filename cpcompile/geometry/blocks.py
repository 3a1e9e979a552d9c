"""Blocks of scores: what attention kernels compute, with a mask or without.

Blocks come from the integers of a causal limit, `Visible.blocks`, or from the key
ranges of a mask, `MaskBlocks.of_source`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Block:
    """A rectangle of scores: `rows` query rows and `keys` keys of one chunk of keys.

    The first ones are `row` and `key`, the others follow at a distance of `step`.
    `triangular` blocks follow the rule of `is_causal`: the i-th row of the block sees
    its first i + 1 keys. In other blocks every row sees every key, unless the block is
    `masked`: then key ranges, or ids, may hide some keys from some rows.

    position: of the first key as key ranges count keys, read where there is a mask.
    """

    row: int
    rows: int
    key: int
    keys: int
    triangular: bool = False
    step: int = 1
    position: int = 0
    masked: bool = False


def visible_blocks(
    q_start: int, q_count: int, k_start: int, k_count: int, causal: bool
) -> tuple[Block, ...]:
    """Return the blocks that queries at [q_start, +q_count) see of a chunk of keys.

    A causal query at position p sees the keys at positions <= p. Any such shape is a
    rectangle that all rows see followed by a triangle, so no mask is ever built, every
    row of a returned block sees at least one key, and an invisible chunk gives ().
    """
    if q_count <= 0 or k_count <= 0:
        return ()
    if not causal:
        return (Block(0, q_count, 0, k_count),)
    offset = q_start - k_start  # row i sees keys j <= i + offset
    blocks = []
    if offset > 0:
        blocks.append(Block(0, q_count, 0, min(offset, k_count)))
    row, key = max(-offset, 0), max(offset, 0)
    if row < q_count and key < k_count:
        blocks.append(Block(row, q_count - row, key, k_count - key, True))
    return tuple(blocks)


def square(block: Block) -> tuple[Block, ...]:
    """Return the same scores with square triangles, as aten's GPU kernels need."""
    if not block.triangular or block.rows == block.keys:
        return (block,)
    side = min(block.rows, block.keys)  # keys past the last row's are seen by nobody
    triangle = replace(block, rows=side, keys=side)
    if block.rows == side:
        return (triangle,)
    first = block.row + side * block.step
    rest = replace(triangle, row=first, rows=block.rows - side, triangular=False)
    return (triangle, rest)


def live_pairs(blocks: Iterable[Block]) -> int:
    """Count the (query, key) pairs that `blocks` compute."""
    total = 0
    for block in blocks:
        if block.triangular:
            square = min(block.rows, block.keys)
            total += square * (square + 1) // 2 + (block.rows - square) * block.keys
        else:
            total += block.rows * block.keys
    return total
