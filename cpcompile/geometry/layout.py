"""The layouts: which tokens of a sequence lie on which rank.

Cost model, passes and operators share these definitions.

Note [Layouts]
A layout deals the tokens of a sequence out to N ranks, n_r of them to rank r. All
layouts deal as many to each as the contiguous one, so that a tensor in any of them is a
DTensor with placement Shard of the permuted sequence, whatever its length; nothing is
padded but what travels in messages of equal size, to `size`. Every rank holds its
tokens in ascending order.

    contiguous   rank r has the r-th of N chunks
    zigzag       rank r has the r-th of N parts of the first half of the sequence, and
                 the r-th from the end of the second half: chunks r and 2N - 1 - r of 2N
    striped      tokens are dealt one by one in rounds: token i is on rank i mod N
    fold         as striped, every other round from the last rank to the first

Where n_r differ, a rank that has all of its tokens is left out of later rounds, and
halves are cut at half of the tokens before a rank, rounded up.

In contiguous and zigzag u consecutive ranks hold together what one rank of N / u holds:
that is TokenLayout(layout, S, N / u, u * size). Drawings, sources and balance are in
docs/layouts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, device


class Layout(Enum):
    """The ways to deal the tokens of a sequence out to N ranks."""

    CONTIGUOUS = "contiguous"  # rank r has the r-th of N chunks
    ZIGZAG = "zigzag"  # rank r has chunks r and 2 N - 1 - r of 2 N
    STRIPED = "striped"  # rank r has every N-th token, from the r-th
    FOLD = "fold"  # of every 2 N tokens, rank r has the r-th and the r-th from the end


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
        """Tokens of the largest chunk; exchanged buffers are padded to it.

        Ranks divide a length that is a symbol, but for few tokens; see Note [Symbolic
        sequence lengths].
        """
        if isinstance(self.length, int):
            return -(-self.length // self.ranks)
        # Needs torch, which those that only plan do not import.
        from cpcompile.geometry.divided_lengths import few_more, rounded_up
        from cpcompile.geometry.lengths import is_symbol

        if is_symbol(self.length):
            few = few_more(self.length, self.ranks)  # as a slice leaves out
            return (self.length - few) // self.ranks + rounded_up(few, self.ranks)
        return -(-self.length // self.ranks)

    def start(self, rank: int) -> int:
        """Return the global position of the first token of `rank`."""
        return min(rank * self.size, self.length)

    def count(self, rank: int) -> int:
        """Return the number of tokens that `rank` really holds."""
        return self.start(rank + 1) - self.start(rank)


@dataclass(frozen=True)
class Runs:
    """The tokens that each rank of a ring holds: `pieces` runs of `size` tokens.

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
        """Make the contiguous layout, see Chunks."""
        return cls(length, ranks, Chunks(length, ranks).size)

    @classmethod
    def of_hybrid(cls, chunks: Chunks, ulysses: int, ulysses_inner: bool) -> Runs:
        """Return the runs that `ulysses` ranks which exchange heads hold together.

        ulysses_inner: whether they are consecutive ranks, and so have one run.
        """
        pieces = 1 if ulysses_inner else ulysses
        ranks, size = chunks.ranks // ulysses, chunks.size * ulysses // pieces
        return cls(chunks.length, ranks, size, pieces)

    @property
    def padded(self) -> int:
        """Tokens of a rank whose runs are all full; what travels is padded to it."""
        return self.pieces * self.size

    def start(self, rank: int, piece: int = 0) -> int:
        """Return the global position of the first token of a run."""
        return min((piece * self.ranks + rank) * self.size, self.length)

    def run(self, rank: int, piece: int) -> int:
        """Return the number of tokens of a run."""
        return min(self.size, self.length - self.start(rank, piece))

    def offset(self, rank: int, piece: int) -> int:
        """Return the place of the first token of a run among the rank's tokens."""
        return sum(self.run(rank, each) for each in range(piece))

    def count(self, rank: int) -> int:
        """Return the number of tokens that the rank holds."""
        return self.offset(rank, self.pieces)


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of a sequence that each rank holds, in one of the layouts.

    See Note [Layouts]. `size` is the number of tokens of the first ranks: rank r holds
    as many tokens as are at [r * size, (r + 1) * size). A rank may be a tensor of some.
    """

    layout: Layout
    length: int
    ranks: int
    size: int

    @classmethod
    def of(cls, layout: Layout, length: int, ranks: int) -> TokenLayout:
        """Make a layout with the token counts of `Chunks` and DTensor's `Shard`."""
        return cls(layout, length, ranks, Chunks(length, ranks).size)

    def start(self, rank: Any) -> Any:
        """Return the number of tokens of the ranks before `rank`."""
        if isinstance(rank, int):
            return min(rank * self.size, self.length)
        return (rank * self.size).clamp(max=self.length)

    def count(self, rank: Any) -> Any:
        """Return the number of tokens that `rank` holds."""
        return self.start(rank + 1) - self.start(rank)

    def head(self, rank: Any) -> Any:
        """Return, for zigzag, how many of its tokens are in the first half."""
        return (self.start(rank + 1) + 1) // 2 - (self.start(rank) + 1) // 2

    def first(self, rank: Any) -> Any:
        """Return, for zigzag, the position of the first token of `rank`."""
        return (self.start(rank) + 1) // 2

    def tail(self, rank: Any) -> Any:
        """Return, for zigzag, the position of its first token in the second half."""
        return self.length - self.start(rank + 1) // 2

    def positions(self, rank: int, device: device | None = None) -> Tensor:
        """Return the positions of the tokens of `rank`, ascending, int64 [count]."""
        import torch  # slow; plans are made without it

        return self._position(rank, torch.arange(self.count(rank), device=device))

    def _position(self, rank: Any, index: Tensor) -> Tensor:
        """Return the position of the `index`-th token of a rank."""
        import torch  # slow; plans are made without it

        position: Tensor = index + self.start(rank)
        if self.layout is Layout.CONTIGUOUS:
            return position
        if self.layout is Layout.ZIGZAG:
            head = self.head(rank)
            tail = self.tail(rank) - head
            return torch.where(index < head, self.first(rank), tail) + index
        # Round j has a token for each of the full ranks, and one more while there is.
        full = self.length // self.size if self.size else 0
        rest = self.length - full * self.size
        if self.layout is Layout.FOLD:
            last = full + (index < rest).to(torch.int64) - 1
            rank = torch.where(index % 2 == 0, rank, last - rank)
        return index * full + index.clamp(max=rest) + rank  # type: ignore[no-any-return]

    def permutation(self, device: device | None = None) -> Tensor:
        """Return the positions in the order of the ranks, int64 [length].

        `x[permutation]`, cut as the contiguous layout is, is `x` in this layout.
        """
        import torch  # slow; plans are made without it

        place = torch.arange(self.length, device=device)
        if self.layout is Layout.CONTIGUOUS or not self.length:
            return place
        return self._position(place // self.size, place % self.size)

    def inverse(self, device: device | None = None) -> Tensor:
        """Return where each position's token lies in the order of the ranks, int64."""
        import torch  # slow; plans are made without it

        position = torch.arange(self.length, device=device)
        if self.layout is Layout.CONTIGUOUS or not self.length:
            return position
        if self.layout is Layout.ZIGZAG:
            mirrored = self.length - 1 - position  # how many tokens follow
            first_half = position < (self.length + 1) // 2
            # Each rank has half of its tokens in either half, in turns.
            head = 2 * position // self.size * self.size
            tail = (2 * mirrored + 1) // self.size * self.size
            end = (tail + self.size).clamp(max=self.length)
            return torch.where(
                first_half,
                head + position - (head + 1) // 2,
                tail + (end + 1) // 2 - (tail + 1) // 2 + end // 2 - 1 - mirrored,
            )
        full, rest = divmod(self.length, self.size)
        early = position < rest * (full + 1)
        late = position - rest * (full + 1)
        dealt = torch.where(early, position // (full + 1), rest + late // max(full, 1))
        turn = torch.where(early, position % (full + 1), late % max(full, 1))
        if self.layout is Layout.FOLD:
            last = full - torch.where(early, 0, 1)
            turn = torch.where(dealt % 2 == 0, turn, last - turn)
        return turn * self.size + dealt

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank of each position's token, and its place there."""
        lies, size = self.inverse(position.device)[position], max(self.size, 1)
        return lies // size, lies % size


@dataclass(frozen=True)
class BatchRows:
    """The rows of a flattened batch: a rank has its tokens of each sequence in turn.

    [2 sequences of 4 tokens] on 2 ranks     0 1 4 5 | 2 3 6 7
    """

    tokens: TokenLayout
    sequences: int

    @property
    def length(self) -> int:
        """Rows of all ranks."""
        return self.tokens.length * self.sequences

    @property
    def ranks(self) -> int:
        """Ranks that share the rows."""
        return self.tokens.ranks

    def count(self, rank: int) -> int:
        """Return the number of rows of `rank`."""
        count: int = self.tokens.count(rank)
        return count * self.sequences

    def permutation(self) -> Tensor:
        """Return the rows in the order of the ranks, int64 [length]."""
        import torch  # slow; plans are made without it

        starts = torch.arange(self.sequences)[:, None] * self.tokens.length
        own = (self.tokens.positions(rank) for rank in range(self.ranks))
        return torch.cat([(starts + x).flatten() for x in own])

    def places(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank of each row, and its place there."""
        import torch  # slow; plans are made without it

        row = torch.arange(self.length, device=row.device)[row]  # within bounds
        sequence, position = row // self.tokens.length, row % self.tokens.length
        rank, place = self.tokens.places(position)
        counts = [self.tokens.count(each) for each in range(self.ranks)]
        return rank, sequence * torch.tensor(counts, device=row.device)[rank] + place


def leaves_ranks_empty(length: int, ranks: int) -> bool:
    """Tell whether the contiguous layout leaves a rank without a token."""
    return Chunks(length, ranks).count(ranks - 1) == 0
