"""Make DTensor tolerate what it meets while Dynamo traces a model with DTensor inputs.

Note [Mixing plain tensors and DTensors]
While Dynamo traces a model whose inputs are DTensors, plain tensors (positions, masks,
plain parameters) meet DTensors long before a backend is called, and DTensor refuses the
mixture. Its switch for that is process wide and would hide mistakes of programs that
have nothing to do with us, so it is on only from the start to the end of a compilation.

Note [Operators without a rule, as Dynamo sees them]
Dynamo runs every call once on fake DTensors, for the shape of the result only; how a
call is really sharded is decided later, by `localise`. So in this phase an operator
without a sharding rule may count as replicated, and an in-place one as done, also one
that writes a DTensor into a plain tensor. DTensor remembers such answers like its own,
so they are forgotten when this phase ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.guards import (
    GuardBuilder,
    _get_closure_vars,
    get_verbose_code_parts,
    install_guard,
)
from torch._dynamo.source import AttrSource, GetItemSource
from torch._guards import Guard, Source
from torch.distributed.tensor import DTensor, Placement, Replicate

# Private interface of the DTensor dispatcher, seen in torch 2.13.
from torch.distributed.tensor._op_schema import (
    OpSchema,
    RuntimeSchemaInfo,
    StrategyType,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from cpcompile.geometry.lengths import is_symbol
from cpcompile.refusals import check_refusal
from cpcompile.torch_private.distributed import by_dtensor

aten = torch.ops.aten
_before: list[bool] = []  # DTensor's switch before the compilation that goes on
_in_backend = 0
_pretended = False  # whether DTensor remembers answers that are not its own


@functools.cache
def install() -> None:
    """Have every compilation run with plain tensors allowed; called once, at import."""
    _register_callbacks()
    clear = callback_handler.clear

    @functools.wraps(clear)
    def clear_others() -> None:
        """Register ours again, which torch._dynamo.reset() makes Dynamo forget."""
        clear()
        _register_callbacks()

    callback_handler.clear = clear_others  # type: ignore[method-assign]
    _install_fallbacks()


def _register_callbacks() -> None:
    callback_handler.register_start_callback(_start)
    callback_handler.register_end_callback(_end)


def guard_global_shape(source: Source, shape: torch.Size) -> None:
    """Recompile where a DTensor input has another global shape.

    Dynamo guards the shape of its local tensor only, and one local size belongs to
    several global ones where shards are uneven: 8 tokens of 16, or of 15. A symbolic
    size has guards of its own.
    """
    whole = AttrSource(source, "shape")
    static = [dim for dim, size in enumerate(shape) if not is_symbol(size)]
    parts = [GetItemSource(whole, dim) for dim in static]
    for part in [whole] if len(static) == len(shape) else parts:
        install_guard(part.make_guard(GuardBuilder.EQUALS_MATCH))


def guard_equal(source: Source, attribute: str) -> None:
    """Recompile where an attribute of an input has another value."""
    whole = AttrSource(source, attribute)
    install_guard(whole.make_guard(GuardBuilder.EQUALS_MATCH))


def guard_value(source: Source, is_same: Callable[[Any], bool]) -> None:
    """Recompile where an input is not `is_same`, which is asked before every call.

    At the root: Dynamo asks nothing about the tensors of a module whose dict is as it
    was, and a write in place does not change the dict.
    """

    def CP_VALUE(builder: Any, guard: Guard) -> None:
        name = f"___cp_is_same_{id(is_same)}"
        closure_vars = {**_get_closure_vars(), name: is_same}
        code = [f"{name}({_name(source)})"]
        text = get_verbose_code_parts(code, guard)
        builder.add_python_lambda_leaf_guard_to_root(
            code, text, closure_vars=closure_vars
        )

    install_guard(source.make_guard(CP_VALUE))


def _name(source: Source) -> str:
    return source.name() if callable(source.name) else source.name  # 2.11: a method


@contextmanager
def plain_means_replicated() -> Iterator[None]:
    """Let plain tensors count as replicated; may be nested.

    See Note [Mixing plain tensors and DTensors].
    """
    before = _allow(True)
    try:
        yield
    finally:
        _allow(before)


@contextmanager
def backend_runs() -> Iterator[None]:
    """Mark the end of Dynamo's tracing: from here on DTensor's answers are meant."""
    global _in_backend
    _forget_pretences()
    _in_backend += 1
    try:
        yield
    finally:
        _in_backend -= 1


def forget_decisions() -> None:
    """Have DTensor forget its decisions, with the meshes and sizes that they name.

    It finds them by mesh and size, and meshes of one shape are equal, as is a symbol
    that guards have fixed to its value: it would answer with the mesh of another group,
    which may have been destroyed meanwhile, or with a size of another trace.
    """
    _clear_sharding_prop_cache()


def dynamo_traces() -> bool:
    """Tell whether calls on fake DTensors are only asked for shapes of results."""
    return bool(_before) and not _in_backend


def _allow(value: bool) -> bool:
    """Set DTensor's switch; return what it was."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = value
    return before


def _forget_pretences() -> None:
    global _pretended
    if _pretended:
        _clear_sharding_prop_cache()
        _pretended = False


def _start(_: Any) -> None:
    _before.append(_allow(True))
    for call in _INTO_PLAIN:
        _handlers().setdefault(call, _pretend)


def _end(_: Any) -> None:
    _forget_pretences()
    if _before:
        _allow(_before.pop())
    if not _before:
        for call in _INTO_PLAIN:
            _handlers().pop(call, None)


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


# DTensor has rules for these, but not for a plain tensor that a DTensor is written to.
_INTO_PLAIN = (
    aten.copy_.default, aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor,
    aten.div_.Tensor,
)  # fmt: skip


_IN_PLACE = (
    "fill_", "index_add_", "index_copy_", "index_put_", "masked_fill_",
    "masked_scatter_", "put_", "scatter_", "scatter_add_", "scatter_reduce_",
)  # fmt: skip


def _install_fallbacks() -> None:
    """Install fallbacks; see Note [Operators without a rule, as Dynamo sees them]."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    original = propagator.propagate_op_sharding_non_cached

    def propagate_or_replicate(op_schema: OpSchema) -> Any:
        try:
            return original(op_schema)
        except Exception as error:  # no rule, or a rule that refuses, by any error
            if not dynamo_traces() or _decomposes(op_schema.op):
                raise
            check_refusal(error, f"the sharding of {op_schema.op}")
        global _pretended
        _pretended = True
        with _replicating(propagator, op_schema.op):
            return original(op_schema)

    propagator.propagate_op_sharding_non_cached = propagate_or_replicate  # type: ignore[method-assign]
    for name in _IN_PLACE:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            _handlers().setdefault(getattr(packet, overload), _pretend)


@contextmanager
def _replicating(propagator: Any, op: Any) -> Iterator[None]:
    """Let `op` gather its operands and have a replicated result, for the time being."""
    rules = propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs
    before = [rule.pop(op, None) for rule in rules]
    rules[0][op] = _all_replicated
    infos = propagator.op_to_schema_info
    had_info = op in infos
    infos.setdefault(op, RuntimeSchemaInfo(needs_pytree=True))
    try:
        yield
    finally:
        del rules[0][op]
        if not had_info:
            del infos[op]
        for rule, function in zip(rules, before, strict=True):
            if function is not None:
                rule[op] = function


def _all_replicated(op_schema: OpSchema) -> StrategyType:
    inputs = op_schema.args_strategy + op_schema.kwargs_strategy
    outputs = [str(x.type) for x in op_schema.op._schema.returns].count("Tensor")
    replicated: list[Placement | None] = [Replicate()] * (outputs + len(inputs))
    return expand_to_full_mesh_op_strategy(
        inputs[0].mesh, op_schema, [replicated], input_index=outputs
    )


def _pretend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if dynamo_traces():
        return args[0]
    return by_dtensor(op, args, kwargs)  # its own rule, or its refusal


def _decomposes(op: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
