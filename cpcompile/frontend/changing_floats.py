"""Compute with floats that change from call to call as with tensors; fix other floats.

    item = f.item();  g = 1 - item;  y = x * g      f: float64, of no dimension
      ->  g = 1 - f;  y = x * g.to(float32)

Dynamo makes inputs of floats that have changed (of all floats with dynamic=True). A
plan or a rule asks for the number of an epsilon or of a dropout rate, which is fixed:
another value is another program. In arithmetic with a tensor a float is a tensor of no
dimension, as AOTAutograd would make it (tensorify_python_scalars) after the passes. The
result keeps its dtype, and is computed with as many digits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from unittest import mock
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor

# Which floats are inputs, and in which dtype they compute; seen in 2.13 and 2.15.
from torch._dynamo import config as dynamo_config
from torch._prims_common import get_computation_dtype

# The pass of AOTAutograd that has Dynamo fix all floats that it does not meet; seen
# in 2.13 and 2.15.
from torch.fx.passes import _tensorify_python_scalars

from cpcompile.passes.graph.calls import spelled
from cpcompile.passes.graph.constant_arguments import Method
from cpcompile.passes.graph.effects import is_in_place
from cpcompile.passes.graph.nodes import (
    all_graphs,
    all_nodes,
    fake_mode_of,
    fake_value,
    insert_call,
    sub_graph,
)
from cpcompile.torch_private.dynamo import (
    TensorifyScalarRestartAnalysis,
    TensorifyState,
)
from cpcompile.torch_private.fake_tensors import SymT, symbol_is_type

_OF_FLOATS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg)
_TO = Method("to")
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_WITH_TENSORS = ("add", "sub", "mul", "div", *_COMPARISONS)

# The first floats that graphs of a function have had, by name.
_floats: WeakKeyDictionary[CodeType, dict[str, float]] = WeakKeyDictionary()


def read_floats(graph: fx.Graph, code: CodeType | None) -> None:
    """Make tensors of the floats that have changed; have Dynamo fix all others.

    AOTAutograd would find out that they are constants, but only after the passes and
    its own trace have run. It would then ask Dynamo for the same.

    Raises: Dynamo's TensorifyScalarRestartAnalysis.
    """
    every = not dynamo_config.assume_static_by_default  # dynamic=True
    firsts = _floats.setdefault(code, {}) if code is not None else {}
    fixed = set[sympy.Symbol]()
    for node, number in _inputs(graph):
        value = number.node.hint
        if not isinstance(number.node.expr, sympy.Symbol) or (
            every and firsts.setdefault(node.name, value) == value
        ):
            fixed.add(number.node._expr)
    for node in all_nodes(graph):
        value = fake_value(node)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            becomes = isinstance(value, torch.SymFloat) and (
                node.op == "placeholder" or spelled(node) == "item"
                or node.target in _OF_FLOATS
            )  # fmt: skip
            if not becomes or not all(_takes_tensors(x) for x in node.users):
                fixed |= value.node._expr.free_symbols
    _begin_anew(x.name for x in fixed if symbol_is_type(x, SymT.FLOAT))
    TensorifyState.clear()  # names are those of other functions, too
    kept = {x.node._expr for _, x in _inputs(graph)} - fixed
    if kept:
        for each in all_graphs(graph):
            _write_tensors(each, kept)


def begin_anew_without_floats(graph: fx.Graph) -> None:
    """Have Dynamo trace again, with numbers for floats that are tensors now.

    Raises: Dynamo's TensorifyScalarRestartAnalysis, if there are any.
    """
    _begin_anew(x.node._expr.name for _, x in _inputs(graph))


@contextmanager
def floats_are_tensors() -> Iterator[None]:
    """Have AOTAutograd leave floats alone, all of which `read_floats` has read."""
    with mock.patch.object(
        _tensorify_python_scalars, "_is_tensorify_enabled", lambda: False
    ):
        yield


def _inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.SymFloat]]:
    """Yield the inputs that are floats in the user's program, each with its number."""
    for node in graph.find_nodes(op="placeholder"):
        if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
            continue  # a tensor of the user may have such a number, too
        number = getattr(fake_value(node), "item_memo", None)
        # Its own expression, not what guards have replaced it by.
        if isinstance(number, torch.SymFloat):
            symbol = number.node._expr
            if isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.FLOAT):
                yield node, number


def _begin_anew(names: Iterator[str]) -> None:
    new = [x for x in names if not TensorifyState.should_specialize(x)]
    if new:  # not for those that Dynamo keeps although it was told to fix them
        for name in new:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _takes_tensors(user: fx.Node) -> bool:
    """Tell whether a call of a float can be made with a tensor of no dimension."""
    if sub_graph(user) is not None or user.target in _OF_FLOATS:
        return True
    value = fake_value(user)
    return (
        spelled(user).removesuffix("_") in _WITH_TENSORS
        and len(user.args) == 2
        and not user.kwargs
        and isinstance(value, Tensor)
        and not value.is_complex()
        and any(isinstance(fake_value(x), Tensor) for x in user.args)
    )


def _write_tensors(graph: fx.Graph, kept: set[sympy.Symbol]) -> None:
    """Make tensors of the floats of `kept` symbols, where all calls take tensors."""
    floats = {node for node, number in _inputs(graph) if number.node._expr in kept}
    fake_mode = fake_mode_of(graph)
    for node in list(graph.nodes):
        value = fake_value(node)
        if isinstance(value, torch.SymFloat) and value.node._expr.free_symbols <= kept:
            if spelled(node) == "item":
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
            with fake_mode:
                node.meta["example_value"] = torch.empty((), dtype=torch.float64)
            floats.add(node)
        elif floats.intersection(node.all_input_nodes) and sub_graph(node) is None:
            _call_with_tensor(node, floats)


def _call_with_tensor(node: fx.Node, floats: set[fx.Node]) -> None:
    """Convert the float that a call takes, and its result, to what they would be."""
    name, result = spelled(node), fake_value(node)
    (number,) = floats.intersection(node.all_input_nodes)
    (tensor,) = (x for x in node.args if x is not number)
    value = fake_value(tensor)
    like = torch.empty([1] * value.dim(), dtype=value.dtype, device="meta")
    compared = name in _COMPARISONS
    dtype = torch.result_type(like, 1.0)
    if not compared:
        dtype = get_computation_dtype(dtype)
    converted, graph = fake_value(number).to(dtype), node.graph
    with graph.inserting_before(node):
        cast = insert_call(graph, _TO, (number, dtype), like=node, value=converted)
    node.replace_input_with(number, cast)
    if name in ("add", "mul"):  # in this order aten keeps all digits of a number
        node.args = (tensor, cast)
    dtype = torch.result_type(like, torch.empty((), dtype=dtype, device="meta"))
    if not compared and not is_in_place(node) and dtype != result.dtype:
        with graph.inserting_after(node):
            cast = insert_call(graph, _TO, (node,), like=node, value=result)
        node.replace_all_uses_with(cast)
        cast.args = (node, result.dtype)
        node.meta["example_value"] = result.to(dtype)
