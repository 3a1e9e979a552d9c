"""The masks that the compiler knows, for operators that would have to summarize them.

A mask of constants is the same in every call. The compiler keeps its integers on the
host under a name, `put_mask`, and gives that name to the operators. They cut it into
blocks once for all layers and calls, and never wait for the device to see it. A name
that is not cached, or no longer, costs one summary per call, see Note [One summary of
the mask].
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks
from cpcompile.torch_private.fake_tensors import disable_current_modes

_CACHED = 64  # masks; a model has one or two per sequence length
_ranges: OrderedDict[str, KeyRanges] = OrderedDict()
_HOST = torch.device("cpu")


def put_mask(fields: Sequence[Tensor | None], q_len: int, kv_len: int) -> str:
    """Keep the mask of `fields` on the host, and return its name.

    fields: key_ranges, q_segment_ids and kv_segment_ids, as in Mask. Equal masks have
    one name.
    """
    fields = [None if x is None else x.detach().cpu() for x in fields]
    key_ranges, q_segment_ids, kv_segment_ids = fields
    content = hashlib.sha256(repr((q_len, kv_len)).encode())
    for x in fields:
        content.update(b"-" if x is None else repr((x.shape, x.dtype)).encode())
        if x is not None:
            content.update(x.contiguous().numpy().tobytes())
    name = content.hexdigest()[:16]
    if name not in _ranges:
        with torch.no_grad():
            _ranges[name] = KeyRanges.of(
                key_ranges, q_segment_ids, kv_segment_ids, q_len, kv_len, _HOST
            )
        if len(_ranges) > _CACHED:
            _ranges.popitem(last=False)
    _ranges.move_to_end(name)
    return name


def is_cached(name: str) -> bool:
    """Tell whether a mask of this name is in the cache."""
    return name in _ranges


def cached_blocks(name: str, cut: Cut) -> MaskBlocks | None:
    """Return MaskBlocks.of for the mask of that name; None if it is not cached.

    cut: of tuples.
    """
    return _blocks(name, cut) if is_cached(name) else None


@functools.lru_cache(maxsize=4 * _CACHED)
def _blocks(name: str, cut: Cut) -> MaskBlocks:
    with disable_current_modes():  # a ring is traced on fake tensors; these are not
        return MaskBlocks.of(_ranges[name], cut)


@functools.lru_cache(maxsize=4 * _CACHED)
def seen_fraction(name: str, kv_len: int) -> float | None:
    """Return the part of the pairs that a mask leaves; None if it is not cached."""
    if not is_cached(name):
        return None
    ranges = _ranges[name]
    with disable_current_modes():
        keys = (ranges.upper - ranges.lower).clamp(min=0)
        return float(keys.sum()) / max(keys.numel() * kv_len, 1)
