"""Ask the aten calls that a call is made of where its tokens go."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from cpcompile.refusals import check_refusal

from ...flow.axes import TokenSum
from ...flow.shaped_calls import (
    ShapedCall,
    TensorShape,
    shaped_call,
)
from ...flow.token_axes import rule_of
from ...flow.token_rules import Rule
from ...graph.sequence_tokens import TokenAxis
from .aten_rules import RULES, SEVERAL, VIEWS
from .padded_tokens import Unproved

aten = torch.ops.aten


class Traces:
    """The aten graphs of calls, remembered: layers repeat."""

    def __init__(self) -> None:
        self._memory: dict[Any, tuple[fx.GraphModule, list[int]]] = {}

    def axes_of(
        self, node: fx.Node, given: dict[fx.Node, TokenAxis], tokens: int
    ) -> tuple[list[TokenAxis | None], bool]:
        """Return the axis of every result of a call, by those of its arguments.

        tokens: their number in this call. Also returns whether the call only views
        them.

        Raises: Unproved, if the call is not token-wise as far as it is known.
        """
        call, leaves = shaped_call(node)
        module, places = self._traced(call)
        axes: dict[fx.Node, Any] = {}
        for placeholder, place in zip(_inputs(module), places, strict=True):
            if leaves[place] in given:
                axes[placeholder] = given[leaves[place]]
        views = True
        for inner in module.graph.nodes:
            if inner.op == "call_function" and any(
                x in axes for x in inner.all_input_nodes
            ):
                axes[inner] = _result(inner, axes, tokens)
                views = views and inner.target in VIEWS
        (results,) = module.graph.output_node().args
        flat, _ = pytree.tree_flatten(results)
        return [axes.get(x) for x in flat], views

    def _traced(self, call: ShapedCall) -> tuple[fx.GraphModule, list[int]]:
        if call.key is None:
            return _trace(call)
        if call.key not in self._memory:
            self._memory[call.key] = _trace(call)
        return self._memory[call.key]


def _inputs(module: fx.GraphModule) -> Sequence[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def _trace(call: ShapedCall) -> tuple[fx.GraphModule, list[int]]:
    """Return the aten graph of a call, and which argument leaves are its inputs."""
    places = [i for i, x in enumerate(call.values) if isinstance(x, TensorShape)]

    def run(*tensors: Tensor) -> Any:
        leaves = list(call.values)
        for place, x in zip(places, tensors, strict=True):
            leaves[place] = x.clone()  # a call in place writes to it
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return call.target(*args, **kwargs)

    try:
        with FakeTensorMode(), torch.no_grad():
            tensors = [_empty(call.values[place]) for place in places]
            table = _decompositions()  # some of them write in place, too
            steps = make_fx(run, decomposition_table=table)(*tensors)
            functional = torch.func.functionalize(steps, remove="mutations")
            return make_fx(functional, decomposition_table=table)(*tensors), places
    except Exception as error:  # whatever it is that cannot be traced
        check_refusal(error, f"the trace of {call.target}")
        raise Unproved(f"{type(error).__name__}: {error}") from error


@functools.cache
def _decompositions() -> dict[Any, Any]:
    norms = [aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm]
    return {**core_aten_decompositions(), **get_decompositions(norms)}


def _empty(x: TensorShape) -> Tensor:
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device)


def _result(node: fx.Node, axes: dict[fx.Node, Any], tokens: int) -> Any:
    """Return the axis of the result of a call, or those of several results."""
    if node.target is operator.getitem:
        several, index = node.args
        assert isinstance(several, fx.Node) and isinstance(index, int)
        return axes[several][index]
    rule = RULES.get(node.target) or rule_of(node)
    value = node.meta["val"]
    several = not isinstance(value, Tensor)
    if rule is None or (several and node.target not in SEVERAL):
        raise Unproved(f"no rule for {node.target}")
    operand = next(x for x in node.all_input_nodes if x in axes)
    if several:
        return _several(node, operand, axes[operand], rule, tokens)
    found = rule.result(node, operand, axes[operand], tokens)
    if found is None or isinstance(found[0], TokenSum):
        raise Unproved(f"{node.target} lets the tokens meet")
    axis, operands = found
    assert isinstance(axis, TokenAxis)
    operands = operands or rule.operands(node, axis, tokens) or {}
    if value.shape[axis.dim] != axis.size(tokens):
        raise Unproved(f"{node.target} changes the number of tokens")
    known = {x: axes[x] for x in node.all_input_nodes if x in axes}
    for x, at in operands.items():
        if x not in known and x.meta["val"].stride(at.dim) == 0:
            known[x] = at  # all are equal
    if operands != known:
        raise Unproved(f"{node.target} meets tokens with something else")
    return axis


def _several(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, rule: Rule, tokens: int
) -> tuple[TokenAxis, ...]:
    """Return the axes of a call with several results, all of which have the tokens."""
    if node.all_input_nodes != [operand]:
        raise Unproved(f"{node.target} has several operands")
    found = rule.result(node, operand, axis, tokens)
    if found is None or isinstance(found[0], TokenSum):
        raise Unproved(f"{node.target} lets the tokens meet")
    return (found[0],) * len(node.meta["val"])
