"""What autograd has recorded of calls of mixers, from the forward to the backward.

    forward     operands, results = ..      token = token_of(Recording(..))
    graph       keeps the token as it keeps any value that the backward reads
    backward    recording_of(token, operands)

A token is a tensor of one number, whose memory holds the recording: with its last use
the recording goes, too, also if no backward comes.

Note [Memory that a compiler writes to]
Inductor writes to the memory of a value after its last use, also to that of operands
and results of operators. A recording that shares memory with them would be wrong in the
backward, and nothing would say so. So it is made of copies. The backward reads these
copies, which makes the forward return them, and so keep them as they are; they are the
recording's if they lie where it has them. Else, as after they were moved or computed
again, the function runs again on what the backward is given.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """The operands of a call, leaves of autograd, and its results."""

    operands: Sequence[Tensor]
    results: Sequence[Tensor]


class _Memory(bytearray):
    """The memory of a token."""

    __slots__ = ("__weakref__", "recording")

    recording: Recording | None


_numbers = itertools.count(1)
_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def token_of(recording: Recording) -> Tensor:
    """Return a token for a recording, which lives as long as the token."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, sys.byteorder))
    memory.recording = recording
    _memories[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def recording_of(token: Tensor, operands: Sequence[Tensor]) -> Recording | None:
    """Return the recording of a token, once; None if it is gone, or not of `operands`.

    See Note [Memory that a compiler writes to].
    """
    memory = _memories.get(int(token.item()))
    if memory is None or memory.recording is None:
        return None
    recording, memory.recording = memory.recording, None
    same = all(
        _place(x) == _place(y)
        for x, y in zip(recording.operands, operands, strict=True)
    )
    return recording if same else None


def _place(x: Tensor) -> tuple[int, ...]:
    return x.data_ptr(), *x.shape, *x.stride()
