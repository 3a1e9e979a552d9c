"""Buffers whose value became a part of the program, which serves no other value.

    mask = self.mask[:S, :S]    read as "causal", so that the program does not read it

Before every call Dynamo asks `Unchanged` about the buffer that the module has then: a
write in place raises its version, another tensor has another address, and only then are
values compared. For another value Dynamo compiles again. A buffer that goes on changing
is data, and its mask a bias.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cpcompile.errors import BufferChangedError
from cpcompile.logs import warn_once
from cpcompile.ranks.digests import value_text
from cpcompile.torch_patches.tracing import guard_value

from ...graph.context import Buffer, Context

# Most values of a buffer that are read: each is a program, and Dynamo keeps 8 of these.
MOST_VALUES = 4

# By the code of a function, and by name and shape of a buffer: the values it has read.
_values: WeakKeyDictionary[CodeType, dict[Any, set[str]]] = WeakKeyDictionary()

# Layers have buffers of one value; one copy is enough.
_copies: WeakValueDictionary[tuple[str, torch.device], Tensor] = WeakValueDictionary()


class Unchanged:
    """Guard of a buffer: it tells whether a tensor has the value that was read.

    The version of a tensor shows writes; writes through `.data` do not raise it.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.name = buffer.name
        key = (value_text(buffer.value), buffer.value.device)
        copy = _copies.get(key)
        self._copy = buffer.value.detach().clone() if copy is None else copy
        _copies[key] = self._copy
        self._seen: Any = WeakIdKeyDictionary()
        self._seen[buffer.value] = (_state(buffer.value), True)
        self._last: tuple[Any, Any, bool] = (lambda: None, None, False)

    def __call__(self, x: Tensor) -> bool:
        state = _state(x)
        last, last_state, same = self._last
        if last() is x and state is not None and state == last_state:
            return same
        last_state, same = self._seen.get(x, (None, False))
        if state is None or state != last_state:
            same = _is_equal(x, self._copy)
            self._seen[x] = state, same
        self._last = weakref.ref(x), state, same
        return same

    def check(self, x: Tensor) -> None:
        """Raise BufferChangedError if the program runs with another value."""
        if not self(x):
            raise BufferChangedError(
                f"{self.name} has changed since it was read as an attention mask, and "
                "torch.compile is kept from compiling again (by a stance, or by guards "
                "that are left out); needed a new compilation: let it compile, or pass "
                "the mask to the compiled function"
            )


def freeze_buffers(ctx: Context, code: CodeType | None) -> dict[fx.Node, Unchanged]:
    """Guard the buffers that were read by value; called when the graph is compiled."""
    unchanged = {}
    for node in ctx.inputs:
        if node in ctx.findings.read_by_value:
            buffer = ctx.buffers[node]
            unchanged[node] = Unchanged(buffer)
            guard_value(buffer.source, unchanged[node])
            if code is not None:
                read = _values.setdefault(code, {}).setdefault(_key(buffer), set())
                read.add(value_text(buffer.value))
    return unchanged


def without_changing(
    buffers: dict[fx.Node, Buffer], code: CodeType | None
) -> dict[fx.Node, Buffer]:
    """Return the buffers that did not have too many values; warn of the others."""
    read = {} if code is None else _values.get(code, {})
    steady = {}
    for node, buffer in buffers.items():
        if len(read.get(_key(buffer), ())) < MOST_VALUES:
            steady[node] = buffer
            continue
        warn_once(
            f"{buffer.name} had {MOST_VALUES} values in attention masks, and each was "
            "compiled: from now on it is a bias, whatever it says, and every pair of a "
            "query and a key is computed; write the mask in the forward, as a function "
            "of positions (torch.arange)"
        )
    return steady


def forget() -> None:
    """Forget which buffers have changed."""
    _values.clear()


def _key(buffer: Buffer) -> tuple[str, torch.Size]:
    return buffer.name, buffer.value.shape


def _state(x: Tensor) -> tuple[int, int] | None:
    """Return a state that is equal until a tensor is written to; None if unknown."""
    return None if x.is_inference() else (x.data_ptr(), x._version)


def _is_equal(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    with torch.no_grad():  # NaN is not equal to itself, its bits are
        return torch.equal(x.detach().view(bits), y.view(bits))
