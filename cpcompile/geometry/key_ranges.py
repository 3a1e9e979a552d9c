"""The keys that each query row may see, as one range per row.

Limits are ranges already. Ids become ranges too: of the keys with a row's id, from the
first to the last. Where these have no others in between, as in packed documents and
with padding at an end, the range says all that the ids say, and they are needed no
more. Cost and memory are those of the sequences, not of pairs.

Legend: B batch of the mask, 1 where all of the batch have the same; R query rows, S all
keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyRanges:
    """The key range of each row: row i of batch b sees no key outside of its range.

    The range is lower[b, i] <= j < upper[b, i].

    lower, upper: int64 [B, R], from 0 to the number of keys.
    exact: bool [B, R], whether the row sees every key of its range.
    """

    lower: Tensor
    upper: Tensor
    exact: Tensor

    @classmethod
    def of(
        cls,
        key_ranges: Tensor | None,
        q_segment_ids: Tensor | None,
        kv_segment_ids: Tensor | None,
        q_len: int,
        kv_len: int,
        device: torch.device,
    ) -> KeyRanges:
        """Find the key ranges of the whole sequences, from the fields of Mask."""
        if key_ranges is None:
            lower = torch.zeros(1, q_len, dtype=torch.int64, device=device)
            upper = torch.full_like(lower, kv_len)
        else:
            lower, upper = key_ranges.to(torch.int64).clamp(0, kv_len).unbind(-1)
        exact = torch.ones_like(lower, dtype=torch.bool)
        if q_segment_ids is not None and kv_segment_ids is not None and kv_len:
            first, last, exact = _of_ids(q_segment_ids, kv_segment_ids)
            lower, upper = torch.maximum(lower, first), torch.minimum(upper, last)
        return cls(lower, upper, exact.expand_as(lower) | (lower >= upper))

    def rows(self, index: Tensor) -> KeyRanges:
        """Return the key ranges of the rows at `index`."""
        return KeyRanges(*(x[:, index] for x in (self.lower, self.upper, self.exact)))


def _of_ids(
    q_segment_ids: Tensor, kv_segment_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where keys with a row's id begin and end, and whether all between have it.

    A stable sort puts the keys of one id together, in the order of their positions.
    """
    batch = max(q_segment_ids.shape[0], kv_segment_ids.shape[0])
    rows = q_segment_ids.to(torch.int64).expand(batch, -1).contiguous()
    keys = kv_segment_ids.to(torch.int64).expand(batch, -1).contiguous()
    ordered, position = keys.sort(dim=-1, stable=True)
    start = torch.searchsorted(ordered, rows)
    stop = torch.searchsorted(ordered, rows, right=True)
    first = position.gather(1, start.clamp(max=keys.shape[1] - 1))
    last = position.gather(1, (stop - 1).clamp(min=0)) + 1
    found = start < stop
    first, last = (torch.where(found, x, 0) for x in (first, last))
    return first, last, last - first == stop - start


@dataclass(frozen=True)
class Seen:
    """The keys that some rows see: the first one, the end, the middle, and which runs.

    sloped: whether each row ends one key after the row before it.
    """

    rows: int
    start: int
    stop: int
    middle: tuple[int, int]
    sloped: bool
    runs: tuple[bool, ...]


_NUMBERS = 6  # of a Seen, without its runs


def seen_runs(ranges: KeyRanges, counts: list[int], stops: list[int]) -> Tensor:
    """Make the table of what consecutive pieces of rows see of runs of keys.

    counts: the number of rows of each piece. stops: where each run of keys ends.

    A piece is cut in two where the first key of its rows changes, if it does so once: a
    document begins there. The table, for `read_table`, also says whether any row has
    holes, and whether the ranges ever decrease. It is int64, on the host. See Note [One
    summary of the mask] in mask_blocks.py.
    """
    if not counts or not stops:
        return torch.zeros(0, dtype=torch.int64)
    lower, upper = ranges.lower, ranges.upper
    falls = (lower.diff() < 0).any() | (upper.diff() < 0).any()
    empty = lower >= upper
    lower, upper = lower.masked_fill(empty, stops[-1]), upper.masked_fill(empty, 0)
    device, pieces, runs = lower.device, 2 * len(counts), len(stops)
    rows, sloped = _cut(lower, upper, counts)
    piece = torch.arange(pieces, device=device)
    piece = piece.repeat_interleave(rows, output_size=lower.shape[1])
    piece = piece.expand_as(lower).flatten()
    ends = torch.tensor(stops, device=device)

    def reduced(x: Tensor, how: str) -> Tensor:
        found = x.new_zeros(pieces)
        return found.scatter_reduce(0, piece, x.flatten(), how, include_self=False)

    holes = ~ranges.exact  # a row with these has no middle
    key_ranges = [
        reduced(lower, "amin"),
        reduced(upper, "amax"),
        reduced(lower.masked_fill(holes, stops[-1]), "amax"),
        reduced(upper, "amin"),
        sloped.long(),
        rows,
    ]
    # A row sees keys in all runs from its first to its last: one more from the first
    # on, one less after the last.
    any_key = (lower < upper).flatten().long()
    steps = torch.zeros(pieces, runs + 1, dtype=torch.int64, device=device)
    at = piece * (runs + 1)
    first = torch.bucketize(lower.flatten(), ends, right=True)
    last = torch.bucketize(upper.flatten() - 1, ends, right=True)
    steps.view(-1).index_add_(0, at + first, any_key)
    steps.view(-1).index_add_(0, at + last + 1, -any_key)
    touched = steps.cumsum(1)[:, :runs] > 0
    columns = [torch.stack(key_ranges, 1), touched.long()]
    flags = torch.stack([holes.any(), falls]).long()
    return torch.cat([*(x.flatten() for x in columns), flags]).cpu()


def _cut(lower: Tensor, upper: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Count the rows of both parts of each piece, and tell which parts are sloped.

    This takes sums up to a row, which cost less than sums by piece, on the device.
    """
    device, length = lower.device, lower.shape[1]
    stop = torch.tensor(counts).cumsum(0)
    start = stop - torch.tensor(counts)
    start, stop = start.to(device), stop.to(device)
    row = torch.arange(length, device=device)

    def up_to(x: Tensor) -> Tensor:
        """Sum x over the rows before each row, [rows + 1]."""
        return torch.cat([x.new_zeros(1), x]).cumsum(0)

    def differs(x: Tensor, step: int) -> Tensor:
        """Tell where x is not that of the row before plus `step`, [rows]."""
        return torch.cat([row[:1] < 0, (x.diff() != step).any(0)])

    changes = differs(lower, 0)
    changes[start] = False
    before, place = up_to(changes.long()), up_to(changes * row)
    once = before[stop] - before[start] == 1
    cut = torch.where(once, place[stop] - place[start], stop)
    first = torch.stack([start, cut], 1).flatten()
    last = torch.stack([cut, stop], 1).flatten()
    breaks = up_to(differs(upper, 1).long())
    breaks = breaks[last] - breaks[(first + 1).clamp(max=length)]
    if lower.shape[0] > 1:
        uneven = up_to((upper != upper[:1]).any(0).long())
        breaks = breaks + uneven[last] - uneven[first]
    return last - first, breaks == 0


def table_size(pieces: int, runs: int) -> int:
    """Return how many numbers `seen_runs` gives."""
    return 2 * pieces * (_NUMBERS + runs) + 2 if pieces and runs else 0


def read_table(
    table: Tensor, pieces: int, runs: int
) -> tuple[list[list[Seen]], bool, bool]:
    """Read a table that `seen_runs` made.

    Returns: what each piece sees, as both parts of a piece that was cut; whether any
    row has holes; and whether the ranges are ordered.
    """
    assert table.numel() == table_size(pieces, runs), "the table is of this cut"
    if not table.numel():
        return [], False, True
    sizes = [2 * pieces * _NUMBERS, 2 * pieces * runs, 2]
    numbers, touched, (has_holes, decreases) = table.split(sizes)
    seen: list[list[Seen]] = [[] for _ in range(pieces)]
    rows_of_table = zip(
        numbers.view(-1, _NUMBERS).tolist(),
        touched.view(-1, runs).bool().tolist(),
        strict=True,
    )
    for number, ((start, stop, *middle, sloped, rows), any_row) in enumerate(
        rows_of_table
    ):
        if rows:
            first, last = middle
            how = (start, stop, (first, last), bool(sloped), tuple(any_row))
            seen[number // 2].append(Seen(rows, *how))
    return seen, bool(has_holes), not decreases
