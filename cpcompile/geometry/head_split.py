"""The spread of attention heads over ranks that exchange tokens for heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadSplit:
    """The spread of attention heads over ranks that hold whole sequences of some heads.

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
        """Number of query heads per rank."""
        return -(-self.heads // self.ranks)

    @property
    def kv_per_rank(self) -> int:
        """Number of key heads per rank: the fewest that group query heads evenly."""
        if not self.heads:
            return 0
        return next(
            count
            for count in range(1, self.per_rank + 1)
            if self.per_rank % count == 0 and self._is_grouped(self.per_rank // count)
        )

    @property
    def copies(self) -> int:
        """Number of places of a key head on all ranks together, one after the other."""
        if not self.heads:
            return 0
        run = self.per_rank // self.kv_per_rank
        return -(-self.heads // self.kv_heads // run)

    @property
    def places(self) -> int:
        """Number of places that are taken on all ranks together, the first ones."""
        return self.kv_heads * self.copies

    def key_groups(self, groups: int) -> int:
        """Return in how many groups keys travel if the query heads do in `groups`.

        One, with the first of them, if several read the same heads.
        """
        run = self.per_rank // self.kv_per_rank
        return groups if self.copies == 1 and self.per_rank // groups % run == 0 else 1

    def _is_grouped(self, run: int) -> bool:
        """Tell whether each run of query heads, from the first, reads one key head."""
        return self.kv_heads == 1 or self.heads // self.kv_heads % run == 0


def group_counts(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """List in how many groups the heads of a rank can be exchanged, one by one, not 1.

    Ranks have equally many heads then, groups too, and a group reads whole heads of
    keys, or is among the readers of one.
    """
    split = HeadSplit(heads, kv_heads, ranks)
    if not heads or heads % ranks:
        return []
    run = split.per_rank // split.kv_per_rank
    return [
        count
        for count in range(2, split.per_rank + 1)
        if split.per_rank % count == 0
        and (split.per_rank // count % run == 0 or run % (split.per_rank // count) == 0)
    ]
