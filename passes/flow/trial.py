"""Run calls on fake tensors, forward and backward, to see whether DTensor can do them.

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
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import LengthNotSymbolic, expected, hashable, is_symbol
from cpcompile.refusals import check_refusal
from cpcompile.torch_patches import lost_writes
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import compute_local_shape_and_global_offset
from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    enable_python_dispatcher,
    failing_quietly,
)
from cpcompile.torch_private.operators import OpOverload

from ..graph.constant_arguments import ConstantArgument
from ..graph.nodes import expected_shape, fake_value
from .misread_rules import MisreadRules, without_masks
from .trial_backward import (
    OnlyWholeGradients,
    backward_problem,
    first_line,
)

DRAWS_NUMBERS = "every rank would draw the same random numbers for its own part"
STATE_CALLS = (torch.amp._enter_autocast, torch.amp._exit_autocast)


class Trial:
    """A runner of calls under one fake mode, as AOTAutograd will run them."""

    def __init__(
        self, fake_mode: FakeTensorMode, symbolic: bool = False, backward: bool = True
    ) -> None:
        self.fake_mode = fake_mode
        self.symbolic = symbolic  # whether some sizes are symbols
        self.backward = backward  # whether gradients are computed
        self._memory: dict[Any, tuple[Any, str | None]] = {}

    def plain(
        self, node: fx.Node, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the value of a node without DTensors.

        Dynamo knows it, unless it saw DTensors here that are plain by now; calls that
        change a state, such as autocast, are made for the calls after them.
        """
        value = fake_value(node)
        was_distributed = any(isinstance(x, DTensor) for x in pytree.tree_leaves(value))
        if was_distributed or call in STATE_CALLS:
            return self.must_run(call, args, kwargs)
        return value

    def must_run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that has to work; its errors are mistakes of ours."""
        with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
            return _require_grad(call(*args, **kwargs), args)

    def run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Return (result, None), or (None, the reason why DTensor cannot do the call).

        With OnlyWholeGradients there are both.
        """
        key = call_key(call, args, kwargs)
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
        with self.fake_mode:
            fresh = [_leaf(x, self.backward) for x in leaves]
        versions = [_version(x) for x in leaves]
        fresh_args, fresh_kwargs = pytree.tree_unflatten(fresh, spec)
        random = RandomNumbers()  # type: ignore[no-untyped-call]
        misread = MisreadRules()  # type: ignore[no-untyped-call]
        with (
            self.fake_mode,
            failing_quietly(),
            enable_python_dispatcher(),
            torch.set_grad_enabled(self.backward),
            torch.autograd.set_detect_anomaly(False),  # which reads values
        ):
            try:
                with misread, lost_writes.LostWrites():
                    with random:
                        result = call(*fresh_args, **fresh_kwargs)
                    problem = untrue(result)
                    if self.backward:
                        problem = problem or backward_problem(fresh, result)
            except Exception as error:  # DTensor raises whatever its rules raise
                by_symbols = _takes_symbols_for_key(error, leaves)
                if not by_symbols:
                    check_refusal(error, f"the trial of {_name(call)}")
                problem = f"{type(error).__name__}: {first_line(error)}"
                if self.symbolic and (
                    by_symbols or self._works_without_symbols(call, args, kwargs)
                ):
                    raise LengthNotSymbolic(f"{_name(call)}: {problem}") from error
                return None, problem
        after = [_version(x) for x in leaves]
        problem = misread.problem or problem
        if random.drawn:
            problem = DRAWS_NUMBERS
        if versions != after:  # last: a write is refused where it would be lost
            problem = WritesArguments("it writes to one of its arguments")
            pairs = enumerate(zip(versions, after, strict=True))
            problem.leaves = {i for i, (old, new) in pairs if old != new}
        if problem is not None and not isinstance(problem, OnlyWholeGradients):
            return None, problem
        with self.fake_mode:
            return pytree.tree_map_only(Tensor, _detached, result), problem

    def _works_without_symbols(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        with self.fake_mode:
            args, kwargs = pytree.tree_map(_with_values, (args, kwargs))
        concrete = Trial(self.fake_mode, backward=self.backward)
        return concrete.run(call, args, kwargs)[1] is None


class WritesArguments(str):
    """The reason why DTensor cannot do a call that writes.

    leaves: which leaves of its arguments the call writes to.
    """

    leaves: set[int]


class RandomNumbers(TorchDispatchMode):
    """A mode that sees whether a call draws random numbers, on DTensors."""

    supports_higher_order_operators = True  # which see no DTensors: see cp_scan
    drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if draws_numbers(func, args, kwargs or {}):
            leaves = pytree.tree_leaves((args, kwargs))
            self.drawn |= any(isinstance(x, DTensor) for x in leaves)
        return func(*args, **(kwargs or {}))


def _takes_symbols_for_key(error: Exception, leaves: list[Any]) -> bool:
    """Tell whether DTensor made a key of strides, which are symbols where no size is.

    Python's operators make of any TypeError that they cannot add, multiply, ...
    """
    texts = ("non-nested SymInt", "unsupported operand type")
    if not isinstance(error, TypeError) or all(x not in str(error) for x in texts):
        return False
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    sizes = [n for x in tensors for n in (*x.shape, *x.stride())]
    return any(isinstance(n, torch.SymInt) for n in sizes)


def draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a call draws random numbers; attention does only for its dropout."""
    if not isinstance(func, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout_p = (
                args[position] if position < len(args) else argument.default_value
            )
            return bool(kwargs.get("dropout_p", dropout_p) != 0.0)
    return True


def _leaf(x: Any, backward: bool) -> Any:
    """Give the trial a tensor of its own, so that gradients end there.

    Without gradients no tensor of the compiled graph requires any, and torch takes
    other ways: matmul flattens tokens for a weight that does.
    """
    if not isinstance(x, DTensor) or not x.requires_grad:
        return x
    return x.detach().requires_grad_(backward)


def _with_values(x: Any) -> Any:
    """Return the same argument with values for symbolic sizes."""
    if isinstance(x, torch.SymInt):
        return expected(x)
    if not isinstance(x, DTensor):
        return x
    local = x.to_local()
    empty = torch.empty_strided(
        *(tuple(map(expected, sizes)) for sizes in (local.shape, local.stride())),
        dtype=x.dtype,
        device=x.device,
    )
    return DTensor.from_local(
        empty,
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=torch.Size(map(expected, x.shape)),
        stride=tuple(map(expected, x.stride())),
    ).requires_grad_(x.requires_grad)


def _detached(x: Tensor) -> Tensor:
    x = without_masks(x) if isinstance(x, DTensor) else x
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
    """Count in-place writes; a DTensor and its local tensor share storage."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    return local._version if isinstance(local, Tensor) else 0


def untrue(result: Any) -> str | None:
    """Say which result DTensor's rules get wrong; None if they get all right.

    An average of averages is not the average: parts may count differently much. The
    rule of convolutions takes some calls for local that are not, and parts are too
    small.
    """
    for x in pytree.tree_leaves(result):
        if isinstance(x, DTensor):
            local = x._local_tensor.shape
            if isinstance(x._local_tensor, DTensor):
                return "a tensor of a class of its own is computed below DTensor"
            if not any(map(is_symbol, (*x.shape, *local))):
                with disable_current_modes():  # it computes with small tensors
                    expected_shape, _ = compute_local_shape_and_global_offset(
                        x.shape, x.device_mesh, x.placements
                    )
                if tuple(local) != tuple(expected_shape):
                    return f"it gives a part {list(local)} of {list(x.shape)}"
            for placement in x.placements:
                if placement.is_partial() and placement.reduce_op == "avg":  # type: ignore[attr-defined]
                    return "it would average the averages of the ranks"
    return None


def wrong_shape(whole: Any, result: Any) -> str | None:
    """Say what is wrong with the shape of a result; `whole` is that of one device."""
    before, after = pytree.tree_leaves(whole), pytree.tree_leaves(result)
    if len(before) != len(after):
        return None
    for one, computed in zip(before, after, strict=True):
        if isinstance(one, Tensor) and isinstance(computed, DTensor):
            wanted, got = expected_shape(one), expected_shape(computed)
            if wanted != got:
                return f"it gives the shape {list(got)}, not {list(wanted)}"
    return None


def call_key(call: Any, args: Any, kwargs: Any) -> Any:
    """Return a key that is equal for calls with equal outcomes.

    None if that cannot be told.
    """
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
            sizes = (*x.shape, *x.stride(), *local.shape, *local.stride())
            parts.append((x.device_mesh, x.placements, x.dtype, x.requires_grad))
            parts.append(tuple(map(hashable, sizes)))
        elif isinstance(x, torch.SymInt):
            parts.append(hashable(x))
        elif isinstance(x, int | float | bool | str | type(None) | torch.dtype):
            parts.append((type(x), x))
        elif isinstance(x, ConstantArgument):
            parts.append(x)
        elif isinstance(x, slice | torch.device | type(...)):
            parts.append(repr(x))
        else:
            return None
    try:
        hash(tuple(parts))
    except TypeError:
        return None
    return tuple(parts)


def _name(call: Callable[..., Any]) -> str:
    return getattr(call, "__name__", str(call))
