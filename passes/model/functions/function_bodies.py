"""Make writes inside of autograd functions functional, forward and backward.

    d = empty_like(x); d[:100] = x[:100] * 2          (in a graph that a call runs)
      ->
    empty_like = aten.empty_like(x);  mul = aten.mul(aten.slice(x, 0, 0, 100), 2)
    copy = aten.copy(aten.slice(empty_like, 0, 0, 100), mul)
    slice_scatter = aten.slice_scatter(empty_like, copy, 0, 0, 100)

Dynamo hands the forward and the backward of an autograd.Function as two graphs to one
call, `autograd_function_apply`. No pass sees into them, and on DTensors a write through
a view may be lost. So both are traced, on the global shapes, into calls of aten that
write nothing. Values that the forward saves become arguments of the backward; a
backward may write into them, because nobody reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    enable_python_dispatcher,
)
from cpcompile.torch_private.operators import autograd_function_apply

from ...graph.effects import is_in_place
from ...graph.nodes import (
    attribute_value,
    fake_mode_of,
    fake_value,
    plain_fake,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class FunctionBodies:
    """The graphs that a call of `autograd_function_apply` runs.

    forward: arguments -> (results, saved values).
    backward: gradients of the results, saved values -> gradients of the arguments.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule


def is_autograd_function(node: fx.Node) -> bool:
    """Tell whether a node calls an autograd.Function of the user."""
    return node.op == "call_function" and node.target is autograd_function_apply


def function_bodies(node: fx.Node) -> FunctionBodies:
    """Return the graphs that a call of an autograd.Function runs."""
    arguments: tuple[Any, ...] = node.args
    forward, backward = map(attribute_value, arguments[:2])
    return FunctionBodies(forward, backward)


def functionalise_bodies(graph: fx.Graph) -> int:
    """Make the autograd functions of a graph that write functional.

    Returns: the number of forwards and backwards that wrote and were rewritten.
    """
    count = 0
    for node in graph.find_nodes(
        op="call_function", target=autograd_function_apply, sort=True
    ):
        bodies = function_bodies(node)
        writing = [x for x in (bodies.forward, bodies.backward) if _writes(x.graph)]
        functional = functional_bodies(node) if writing else None
        if functional is not None:
            replace_bodies(node, functional)
            count += len(writing)
    return count


def replace_bodies(node: fx.Node, bodies: FunctionBodies) -> None:
    """Make a call of an autograd.Function run the given graphs."""
    owner = node.graph.owning_module
    assert owner is not None, "Dynamo's graphs belong to a module"
    for number, module in enumerate((bodies.forward, bodies.backward)):
        _write_out_constants(module)
        name = f"{node.name}_{('forward', 'backward')[number]}"
        owner.add_submodule(name, module)
        with node.graph.inserting_before(node):
            body = node.graph.get_attr(name)
        node.update_arg(number, body)
    for x in node.graph.find_nodes(op="get_attr"):
        if not x.users:
            node.graph.erase_node(x)


def _write_out_constants(module: fx.GraphModule) -> None:
    """Make the constant tensors of a body anew in each call, from their numbers.

    If the body held them, AOTAutograd would take them for buffers of the model.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            with module.graph.inserting_before(node):
                options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
                numbers = (value.tolist(),)
                constant = module.graph.call_function(torch.tensor, numbers, options)
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)
    module.graph.lint()
    for name, _ in list(module.named_buffers(recurse=False)):
        delattr(module, name)
    module.recompile()


def functional_bodies(
    node: fx.Node, table: Mapping[Any, Any] | None = None
) -> FunctionBodies | None:
    """Return the graphs of a call without writes, or None.

    None if others can read what the call writes, if an argument is a symbolic number,
    or if a body works on DTensors.

    table: decompositions, as make_fx takes them.
    """
    bodies, fake_mode = function_bodies(node), fake_mode_of(node.graph)
    values = [plain_fake(fake_value(x)) for x in node.args[2:]]
    if any(isinstance(x, torch.SymInt | torch.SymFloat) for x in values):
        return None
    try:
        forward = _functional(bodies.forward, values, fake_mode, table)
        results, saved = _results(forward)
        tangents = [_like(x, fake_mode) for x in results]
        values = [*tangents, *saved]
        backward = _functional(bodies.backward, values, fake_mode, table)
    except DTensorInside:
        return None
    if _written_inputs(forward):
        return None
    outer_memory = {
        _memory(x) for x in (*_inputs(forward), *results) if isinstance(x, Tensor)
    }
    for number in _written_inputs(backward):
        own = number >= len(tangents) and _memory(values[number]) not in outer_memory
        if not own and number >= len(tangents):
            return None
    for module in (forward, backward):
        for write in module.graph.find_nodes(
            op="call_function", target=aten.copy_.default
        ):
            module.graph.erase_node(write)
        module.graph.eliminate_dead_code()
        module.recompile()
    return FunctionBodies(forward, backward)


class DTensorInside(Exception):
    """A body works on DTensors, so that it has no meaning on plain tensors."""


def _writes(graph: fx.Graph) -> bool:
    return any(
        is_in_place(x) for x in graph.nodes if x.op in ("call_function", "call_method")
    )


def _functional(
    module: fx.GraphModule,
    values: list[Any],
    fake_mode: FakeTensorMode,
    table: Mapping[Any, Any] | None,
) -> fx.GraphModule:
    if any(isinstance(fake_value(x), DTensor) for x in module.graph.nodes):
        raise DTensorInside
    before = torch.is_grad_enabled()

    def run(*args: Any) -> Any:
        with torch.no_grad():  # the graph leaves gradients on
            return fx.Interpreter(module).run(*args)

    with fake_mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta():
        steps = make_fx(run)(*values)
        pure = torch.func.functionalize(fx.Interpreter(steps).run, remove="mutations")
        decompositions = {aten.copy.default: _copy, **(table or {})}
        functional = make_fx(pure, decomposition_table=decompositions)(*values)
    torch.set_grad_enabled(before)
    return functional


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what a write of `source` to all of x leaves in x.

    Neither DTensor nor torch has a rule for it.
    """
    return source.to(x).expand(x.shape).clone()


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [x.meta.get("val") for x in module.graph.find_nodes(op="placeholder")]


def _results(module: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """Return the values of a graph's results, and those that it saves."""
    returned: Any = module.graph.output_node().args[0]
    results, saved = fx.node.map_arg(returned, lambda x: x.meta["val"])
    several = isinstance(results, list | tuple)
    return list(results) if several else [results], list(saved)


def _written_inputs(module: fx.GraphModule) -> list[int]:
    """Return the numbers of the arguments that a graph writes into at its end."""
    inputs = list(module.graph.find_nodes(op="placeholder"))
    return [inputs.index(x.args[0]) for x in _writes_to_inputs(module)]


def _writes_to_inputs(module: fx.GraphModule) -> list[fx.Node]:
    writes = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return list(writes)


def _like(value: Any, fake_mode: FakeTensorMode) -> Any:
    """Make a tensor like the gradient of a result; return other values as they are."""
    if not isinstance(value, Tensor):
        return value
    with fake_mode:
        return torch.empty_like(value)


def _memory(x: Any) -> int | None:
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else None
