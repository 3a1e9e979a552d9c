"""Runs calls on fake tensors, forward and backward, to see whether DTensor can do them.

Whether DTensor has a sharding rule is found out by asking it, with the very arguments
of the call. The backward is tried too: it runs later, inside of AOTAutograd, where a
missing rule could no longer be answered by a fallback. Layers of a model repeat, so
results are remembered by the specification of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cpcompile.passes.graph import fake_value
from cpcompile.tracing import plain_means_replicated

_STATE_CALLS = {"_enter_autocast", "_exit_autocast"}


class Trial:
    """Runs calls under one fake mode."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self._memory: dict[Any, tuple[Any, str | None]] = {}

    def plain(
        self, node: fx.Node, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The value of a node without DTensors.

        Dynamo knows it, unless it saw DTensors here that are plain by now; calls that
        change a state, such as autocast, are made for the calls after them.
        """
        value = fake_value(node)
        was_distributed = any(isinstance(x, DTensor) for x in pytree.tree_leaves(value))
        if was_distributed or getattr(call, "__name__", "") in _STATE_CALLS:
            return self.must_run(call, args, kwargs)
        return value

    def must_run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call that has to work; its errors are mistakes of ours."""
        with self.fake_mode, torch.no_grad():
            return _require_grad(call(*args, **kwargs), args)

    def run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """(result, None), or (None, why DTensor cannot do it)."""
        key = _key(call, args, kwargs)
        if key is not None and key in self._memory:
            return self._memory[key]
        outcome = self._run(call, args, kwargs)
        if key is not None:
            self._memory[key] = outcome
        return outcome

    def _run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fresh = [_leaf(x) for x in leaves]
        versions = [_version(x) for x in leaves]
        fresh_args, fresh_kwargs = pytree.tree_unflatten(fresh, spec)
        random = _Random()  # type: ignore[no-untyped-call]
        with self.fake_mode, torch.enable_grad():
            try:
                with random:
                    result = call(*fresh_args, **fresh_kwargs)
                problem = _untrue(result) or _backward_problem(fresh, result)
            except Exception as error:  # DTensor raises whatever its rules raise
                return None, f"{type(error).__name__}: {_first_line(error)}"
        if versions != [_version(x) for x in leaves]:
            problem = "it writes to one of its arguments"
        if random.drawn:
            problem = "every rank would draw the same random numbers for its own part"
        if problem is not None:
            return None, problem
        return pytree.tree_map_only(Tensor, _detached, result), None


class _Random(TorchDispatchMode):
    """Sees whether a call draws random numbers, on DTensors."""

    drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags and func not in _ATTENTION:
            self.drawn |= any(isinstance(x, DTensor) for x in leaves)
        return func(*args, **(kwargs or {}))


# Tagged for its dropout, of which shard_graph has seen that there is none.
_ATTENTION = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)


def _leaf(x: Any) -> Any:
    """A tensor of its own for the trial, so that gradients end there."""
    if not isinstance(x, DTensor) or not x.requires_grad:
        return x
    return x.detach().requires_grad_()


def _detached(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.requires_grad else x


def _require_grad(result: Any, args: Any) -> Any:
    """Mark float results as differentiable if an argument was."""
    if not any(
        isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(args)
    ):
        return result
    return pytree.tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
        result,
    )


def _version(x: Any) -> int:
    """Counts in-place writes; a DTensor and its local tensor share storage."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    return local._version if isinstance(local, Tensor) else 0


def _untrue(result: Any) -> str | None:
    """An average of averages is not the average: parts may count differently much."""
    for x in pytree.tree_leaves(result):
        if isinstance(x, DTensor):
            for placement in x.placements:
                if placement.is_partial() and placement.reduce_op == "avg":  # type: ignore[attr-defined]
                    return "it would average the averages of the ranks"
    return None


def _backward_problem(leaves: list[Any], result: Any) -> str | None:
    inputs = [x for x in leaves if isinstance(x, DTensor) and x.requires_grad]
    outputs = [
        x for x in pytree.tree_leaves(result) if isinstance(x, DTensor) and x.grad_fn
    ]
    if not inputs or not outputs:
        return None
    # Gradients arrive in the layout of the value, or contiguous: views differ on them.
    as_they_are = [_tangent(x) for x in outputs]
    for tangents in (as_they_are, [x.contiguous() for x in as_they_are]):
        with plain_means_replicated():
            torch.autograd.grad(
                outputs, inputs, tangents, allow_unused=True, retain_graph=True
            )
        if all(x.is_contiguous() for x in as_they_are):
            break
    return None


def _tangent(x: DTensor) -> DTensor:
    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    detached = x.detach()
    assert isinstance(detached, DTensor)
    return detached.redistribute(placements=whole)


def _key(call: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts: list[Any] = [
        call,
        str(spec),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    ]
    for x in leaves:
        if isinstance(x, DTensor):
            local = x._local_tensor
            parts.append((x._spec, x.dtype, tuple(local.shape), local.stride()))
            parts.append(x.requires_grad)
        elif isinstance(x, int | float | bool | str | type(None) | torch.dtype):
            parts.append((type(x), x))
        elif isinstance(x, slice | torch.device | type(...)):
            parts.append(repr(x))
        else:
            return None
    try:
        hash(tuple(parts))
    except TypeError:
        return None
    return tuple(parts)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:160]
