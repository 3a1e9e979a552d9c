"""Keep calls of functions that mix tokens whole, where Dynamo would inline or break.

The fallback of a gated delta rule is a loop over chunks, which Dynamo unrolls; the
kernel that a package brings is `torch.compiler.disable`d, and breaks the graph. Under
backend "cp" a call of such a function becomes one call of an operator. Other backends
are left alone. Seen in torch 2.13 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    SkipFunctionVariable,
    TensorVariable,
    TupleVariable,
    UserFunctionVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from cpcompile.torch_patches.graph_breaks import is_ours

Kept = tuple[Callable[..., Any], str, list[torch.Tensor], tuple[bool, ...] | None]
"""An operator, the text of a call, its tensors, and which of several results it has."""


@functools.cache
def install(
    is_known: Callable[[Any], bool],
    keep: Callable[[Any, list[Any], dict[str, Any]], Kept | Callable[..., Any] | None],
) -> None:
    """Have Dynamo ask about every function that it calls.

    is_known: tells whether calls of a function are to be kept.
    keep: returns what a call becomes, or what is called in its place; None if it
        stays as it is.
    """
    original = InstructionTranslatorBase.call_function

    @functools.wraps(original)
    def call_function(
        self: Any,
        fn: VariableTracker,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> None:
        function = _function(fn) if is_ours(self.output.compiler_fn) else None
        if function is not None and is_known(function):
            kept = _kept(self, function, args, kwargs, keep)
            if isinstance(kept, VariableTracker):
                self.push(kept)
                return
            if kept is not None:
                fn = UserFunctionVariable(cast("FunctionType", kept))
        original(self, fn, args, kwargs)

    InstructionTranslatorBase.call_function = call_function  # type: ignore[method-assign]


def _function(fn: VariableTracker) -> Any:
    """Return the Python function that a variable stands for, or None."""
    fn = fn.realize()
    if isinstance(fn, UserFunctionVariable):
        return fn.fn
    if isinstance(fn, SkipFunctionVariable | TorchInGraphFunctionVariable):
        return fn.value
    return None


def _kept(
    tx: Any,
    function: Any,
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
    keep: Callable[[Any, list[Any], dict[str, Any]], Kept | Callable[..., Any] | None],
) -> VariableTracker | Callable[..., Any] | None:
    variables: dict[int, VariableTracker] = {}
    plain_args = [_plain(x, variables) for x in args]
    plain_kwargs = {name: _plain(x, variables) for name, x in kwargs.items()}
    call = keep(function, plain_args, plain_kwargs)
    if call is None or callable(call):
        return call
    operator, text, tensors, results = call
    operands = ListVariable([variables[id(x)] for x in tensors])
    made = TorchInGraphFunctionVariable(operator).call_function(
        tx, [operands, ConstantVariable.create(text)], {}
    )
    values = list(made.unpack_var_sequence(tx))
    if results is None:
        return values[0]
    return TupleVariable(
        [values.pop(0) if x else ConstantVariable.create(None) for x in results]
    )


def _plain(x: VariableTracker, variables: dict[int, VariableTracker]) -> Any:
    """Return the value of a variable; of a tensor a fake one, whose variable is kept.

    A variable that is neither a tensor nor a constant stays what it is.
    """
    x = x.realize()
    if isinstance(x, TensorVariable):
        value = x.as_proxy().node.meta["example_value"]
        variables[id(value)] = x
        return value
    if isinstance(x, BaseListVariable):
        values = [_plain(each, variables) for each in x.items]
        return tuple(values) if isinstance(x, TupleVariable) else values
    if not x.is_python_constant():
        return x
    return x.as_python_constant()
