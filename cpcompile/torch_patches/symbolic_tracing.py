"""Let DTensor and make_fx keep a sequence length symbolic while they are traced.

Where torch 2.13 loses it, by private interfaces:

- Shard cuts a tensor by torch.chunk, in chunks of (S + N - 1) // N tokens. That is
  S // N where N divides S, but no rule of the symbols says so, and sizes that are equal
  look different.
- make_fx remembers for every symbol the value that had it last, and starts from it when
  it builds an expression. A value that was derived from the symbol, such as 2 * S // 2,
  then ends up defined by itself. The first value, which is an input, is the right one.
- Chunks of 3 c - m tokens are (3 c - m + 2) // 3, which torch knows as
  c + (2 - m) // 3, and not as c, which it is for 0 < m < 3.
- DTensor compares the bytes of ways to move a value, and each comparison becomes a
  guard on the length.

And what makes it slow: DTensor works out the placements of every call anew. Layers
repeat, so they are remembered for the time of a compilation, for each trace: the sizes
of results are objects of one trace, which may be those of its tangents in the next,
and the forward would be computed from these.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor, Shard, _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.functions import FloorDiv

from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    expected,
    guards_on,
    hashable,
    is_fixed,
    is_symbol,
)
from cpcompile.ranks import agreement
from cpcompile.torch_patches.tracing import dynamo_traces, forget_decisions

log = logging.getLogger(__name__)

T = TypeVar("T")


@functools.cache
def install() -> None:
    """Cut symbolic sizes that the ranks divide into equal chunks; Dynamo cuts too."""
    chunk = getattr(Shard, "_custom_chunk", None)
    if chunk is None:  # another torch, which may keep the length or not
        return

    @functools.wraps(chunk)
    def even_chunks(tensor: Tensor, num_chunks: Any, dim: int) -> list[Tensor]:
        size = tensor.shape[dim]
        if isinstance(size, torch.SymInt) and guard_or_false(size % num_chunks == 0):
            part = size // num_chunks
            return [tensor.narrow(dim, part * i, part) for i in range(num_chunks)]
        return list(chunk(tensor, num_chunks, dim=dim))

    Shard._custom_chunk = staticmethod(even_chunks)  # type: ignore[method-assign]


Way = Callable[[], tuple[T, dict[str, str], Sequence[torch.SymInt]]]


def attempt(
    ways: Sequence[Way[T]],
    group: ProcessGroup,
    name: str,
    not_handled: tuple[type[Exception], ...],
) -> T | None:
    """Return what the first of `ways` that can makes, with the length as a symbol.

    Returns None, on every rank, if each way fails on some rank, or if the guards on the
    length are not the same on all: then a rank would run where others compile.

    Args:
        ways: each returns what it made, what must be the same on every rank, and the
            sizes that are symbols in the program.
        name: of the graph, for the log.
        not_handled: errors that are raised nevertheless.
    """
    problems = []
    for way in ways:
        program, problem = _attempt(way, group, name, not_handled)
        if not problem:
            return program
        log.debug("%s serves the sizes of one call only: %s", name, problem)
        problems.append(problem)
    log.info("%s serves the sizes of one call only: %s", name, problems[0])
    return None


def _attempt(
    way: Way[T],
    group: ProcessGroup,
    name: str,
    not_handled: tuple[type[Exception], ...],
) -> tuple[T | None, str]:
    """Run one way; return what it makes, or why that is nothing."""

    doing = f"compiles {name}"

    def make() -> tuple[T, dict[str, str]]:
        with _length_stays_symbolic():
            program, items, sizes = way()
        if any(is_fixed(n, group.size()) for n in sizes):
            raise LengthNotSymbolic("the guards leave no other")
        guards = "; ".join(map(guards_on, sizes))
        log.debug("%s: guards on the sequence length: %s", name, guards)
        if not agreement.all_equal(group, guards, doing):
            raise LengthNotSymbolic("the ranks need different guards on it")
        return program, items

    tried = agreement.attempt(group, make, not_handled, doing)
    if tried.problem is not None:  # torch raises whatever it raises
        text = str(tried.problem).strip() or type(tried.problem).__name__
        return None, text.splitlines()[0][:200]
    return tried.made, ""


def with_fixed_sizes(x: Tensor) -> Tensor:
    """Return x, with integers for the sizes that guards have fixed.

    Such a size is still a SymInt. DTensor makes no key of it for its memory of
    decisions, and no tracer has a proxy for it. A DTensor keeps its local tensor.
    """
    sizes = (*x.shape, *x.stride())
    if all(isinstance(n, int) or is_symbol(n) for n in sizes):
        return x
    shape, stride = torch.Size(map(_plain, x.shape)), tuple(map(_plain, x.stride()))
    if isinstance(x, DTensor):
        if any(map(is_symbol, sizes)):
            return x
        meta = TensorMeta(shape, stride, x.dtype)
        spec = DTensorSpec(x.device_mesh, x.placements, meta)
        return DTensor(x._local_tensor, spec, requires_grad=x.requires_grad)
    if not isinstance(x, FakeTensor) or x.storage_offset() != 0:
        return x
    with x.fake_mode:
        fixed = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
    return fixed.requires_grad_(x.requires_grad)


def _plain(n: Any) -> Any:
    return n if is_symbol(n) else int(n)


@contextmanager
def _length_stays_symbolic() -> Iterator[None]:
    """Keep the length symbolic as the module says, for the time of one compilation."""
    start = proxy_tensor._init_proxy_trackers

    def first_value_counts(tracer: Any) -> None:
        start(tracer)
        tracer.sympy_expr_tracker = _FirstWins()

    propagator = DTensor._op_dispatcher.sharding_propagator
    decide, decided = propagator.propagate_op_sharding_non_cached, {}

    def remember(op_schema: OpSchema) -> Any:
        operands = (op_schema.args_schema, op_schema.kwargs_schema)
        trace = (dynamo_traces(), proxy_tensor.get_proxy_mode())
        key = (*_key((op_schema.op, *operands)), *trace)
        try:
            hash(key)
        except TypeError:
            return decide(op_schema)
        if key not in decided:
            decided[key] = decide(op_schema)
        return decided[key]

    with (
        _parts_stay_exact(),
        mock.patch.object(propagator, "propagate_op_sharding_non_cached", remember),
        mock.patch.object(proxy_tensor, "_init_proxy_trackers", first_value_counts),
    ):
        try:
            yield
        finally:  # DTensor has remembered sizes that are symbols of this trace
            forget_decisions()


def _key(x: Any) -> Any:
    if isinstance(x, DTensorSpec):
        meta = x.tensor_meta
        if meta is None:
            return (x.mesh, x.placements)
        sizes = tuple(map(hashable, (*meta.shape, *meta.stride)))
        return (x.mesh, x.placements, meta.dtype, len(meta.shape), sizes)
    if isinstance(x, list | tuple):
        return (type(x), *map(_key, x))
    if isinstance(x, dict):
        return tuple((k, _key(v)) for k, v in x.items())
    if isinstance(x, torch.SymInt):
        return hashable(x)
    return (type(x), x)


class _FirstWins(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


@contextmanager
def _parts_stay_exact() -> Iterator[None]:
    """Compute such parts as the module says."""
    divided = _divided(SymNode.int_floordiv)
    with (
        mock.patch.object(SymNode, "int_floordiv", divided),
        mock.patch.object(_collective_utils, "spec_to_bytes", _bytes_here),
    ):
        yield


def _bytes_here(spec: DTensorSpec) -> int:
    """Return the bytes in this call: which way is cheaper makes no guard."""
    meta = spec.tensor_meta
    assert meta is not None, "what is moved has a shape"
    return math.prod(map(expected, meta.shape)) * meta.dtype.itemsize


def _divided(divide: Callable[..., Any]) -> Callable[..., Any]:
    """Give parts of a quotient that have one value only that value."""

    def divided(one: Any, other: Any) -> Any:
        result = divide(one, other)
        expression, environment = result.expr, result.shape_env
        values = {}
        for part in expression.atoms(FloorDiv):
            bounds = environment.bound_sympy(part)
            if bounds.is_singleton():
                values[part] = bounds.lower
        if not values:
            return result
        return SymNode(expression.xreplace(values), environment, int, result.hint)

    return divided
