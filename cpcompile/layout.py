"""Which tokens lie on which rank, and which keys a block of queries may see.

Everything here is arithmetic on integers, without tensors, so that cost model, passes
and operators share one definition.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunks:
    """The contiguous layout: rank r holds tokens [r * size, (r + 1) * size).

    `size` is ceil(length / ranks), as in `torch.chunk` and DTensor's `Shard`, so the
    last ranks may hold fewer tokens, or none where there are fewer tokens than ranks.
    """

    length: int
    ranks: int

    @property
    def size(self) -> int:
        """Tokens of the largest chunk; exchanged buffers are padded to it."""
        return -(-self.length // self.ranks)

    def start(self, rank: int) -> int:
        """Global position of the first token of `rank`."""
        return min(rank * self.size, self.length)

    def count(self, rank: int) -> int:
        """Number of tokens that `rank` really holds."""
        return self.start(rank + 1) - self.start(rank)


@dataclass(frozen=True)
class Runs:
    """Which tokens a rank of a ring holds: `pieces` runs of `size` tokens.

    Run p of rank r starts at position (p * ranks + r) * size. Runs end with the
    sequence, so that the last ones may be shorter, or empty. A rank holds its runs one
    after the other. One run of ceil(length / ranks) tokens is the contiguous layout.
    """

    length: int
    ranks: int
    size: int
    pieces: int = 1

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> Runs:
        """The contiguous layout, see Chunks."""
        return cls(length, ranks, Chunks(length, ranks).size)

    @property
    def padded(self) -> int:
        """Tokens of a rank whose runs are all full; what travels is padded to it."""
        return self.pieces * self.size

    def start(self, rank: int, piece: int = 0) -> int:
        """Global position of the first token of a run."""
        return min((piece * self.ranks + rank) * self.size, self.length)

    def run(self, rank: int, piece: int) -> int:
        """Number of tokens of a run."""
        return min(self.size, self.length - self.start(rank, piece))

    def offset(self, rank: int, piece: int) -> int:
        """Place of the first token of a run among the tokens that the rank holds."""
        return sum(self.run(rank, each) for each in range(piece))

    def count(self, rank: int) -> int:
        """Number of tokens that the rank holds."""
        return self.offset(rank, self.pieces)


@dataclass(frozen=True)
class HeadSplit:
    """Whole sequences of some heads each: how heads are spread over ranks.

    Query head h reads key head h // (heads / kv_heads). Every rank gets the same number
    of heads, so the last ones are padded with heads of zeros. A key head goes to every
    rank whose query heads read it, several times if that is what groups them evenly.
    With kv_heads = heads it says where the query heads themselves are.
    """

    heads: int
    kv_heads: int  # divides heads
    ranks: int

    @property
    def per_rank(self) -> int:
        """Query heads per rank."""
        return -(-self.heads // self.ranks)

    @property
    def kv_per_rank(self) -> int:
        """Key heads per rank, the fewest that group its query heads evenly."""
        return next(
            count
            for count in range(1, self.per_rank + 1)
            if self.per_rank % count == 0 and self._is_grouped(self.per_rank // count)
        )

    @property
    def copies(self) -> int:
        """How many places a key head has on all ranks together, one after the other."""
        run = self.per_rank // self.kv_per_rank
        return -(-self.heads // self.kv_heads // run)

    @property
    def places(self) -> int:
        """How many places on all ranks together are taken, the first ones."""
        return self.kv_heads * self.copies

    def _is_grouped(self, run: int) -> bool:
        """Whether every run of query heads, from the first on, reads one key head."""
        return self.kv_heads == 1 or self.heads // self.kv_heads % run == 0


def leaves_ranks_empty(length: int, ranks: int) -> bool:
    """Whether the contiguous layout leaves a rank without a token."""
    return Chunks(length, ranks).count(ranks - 1) == 0


@dataclass(frozen=True)
class Block:
    """A rectangle of scores: query rows [row, row + rows), keys [key, key + keys).

    `triangular` blocks follow the rule of `is_causal`: the i-th row of the block sees
    its first i + 1 keys. In other blocks every row sees every key.
    """

    row: int
    rows: int
    key: int
    keys: int
    triangular: bool


def visible_blocks(
    q_start: int, q_count: int, k_start: int, k_count: int, causal: bool
) -> tuple[Block, ...]:
    """Blocks that cover what queries at [q_start, +q_count) see of a chunk of keys.

    A causal query at position p sees the keys at positions <= p. Any such shape is a
    rectangle that all rows see followed by a triangle, so no mask is ever built, every
    row of a returned block sees at least one key, and an invisible chunk gives ().
    """
    if q_count <= 0 or k_count <= 0:
        return ()
    if not causal:
        return (Block(0, q_count, 0, k_count, False),)
    offset = q_start - k_start  # row i sees keys j <= i + offset
    blocks = []
    if offset > 0:
        blocks.append(Block(0, q_count, 0, min(offset, k_count), False))
    row, key = max(-offset, 0), max(offset, 0)
    if row < q_count and key < k_count:
        blocks.append(Block(row, q_count - row, key, k_count - key, True))
    return tuple(blocks)


def square(block: Block) -> tuple[Block, ...]:
    """The same scores with square triangles, as aten's GPU kernels need them."""
    if not block.triangular or block.rows == block.keys:
        return (block,)
    side = min(block.rows, block.keys)  # keys past the last row's are seen by nobody
    triangle = Block(block.row, side, block.key, side, True)
    if block.rows == side:
        return (triangle,)
    rest = Block(block.row + side, block.rows - side, block.key, side, False)
    return (triangle, rest)


def live_pairs(blocks: tuple[Block, ...]) -> int:
    """Number of (query, key) pairs that `blocks` compute."""
    total = 0
    for block in blocks:
        if block.triangular:
            square = min(block.rows, block.keys)
            total += square * (square + 1) // 2 + (block.rows - square) * block.keys
        else:
            total += block.rows * block.keys
    return total
