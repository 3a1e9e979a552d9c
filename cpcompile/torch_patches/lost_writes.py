"""Raise where DTensor would write into memory that nobody reads.

    x: Shard(0);  part = x[3:9];  part.copy_(y)

A slice of the sharded dimension needs rows of other ranks, so that DTensor gathers x
and slices what it gathered: `part` is no view of x any more. A write into it is
computed and dropped, and who reads x later reads old numbers (torch 2.11 to 2.15).

Writes of the user's program are made functional before they get here
(`passes/model/mutation`, AOTAutograd); this is what makes sure of it, while AOTAutograd
traces, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cpcompile.errors import CPError


class LostWriteError(CPError, RuntimeError):
    """An in-place write into a copy that DTensor made of a part of a tensor."""


class LostWrites(TorchDispatchMode):
    """A dispatch mode that raises LostWriteError for such calls on DTensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: dict[int, Any] = {}  # memory that views have for themselves

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile and cache as if no mode was active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(x, DTensor) for x in types):
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        for x in _operands(func, args, kwargs, written=True):
            if _memory(x)._cdata in self._copies:
                raise LostWriteError(
                    f"{func} writes into a part of a tensor of which each rank has "
                    "another part; it would be lost"
                )
        result = func(*args, **kwargs)
        viewed = {_memory(x)._cdata for x in _operands(func, args, kwargs, False)}
        for x in pytree.tree_leaves(result) if viewed else ():
            memory = _memory(x) if isinstance(x, DTensor) else None
            if memory is not None and memory._cdata not in viewed:
                self._copies[memory._cdata] = memory
        return result


def _operands(
    op: OpOverload, args: Any, kwargs: Any, written: bool
) -> Iterator[DTensor]:
    """Yield the DTensors that a call writes into, or that its results are views of."""
    for number, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        if info is None or info.is_write is not written:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, DTensor) and isinstance(x._local_tensor, Tensor):
                yield x


def _memory(x: DTensor) -> Any:
    return x._local_tensor.untyped_storage()
