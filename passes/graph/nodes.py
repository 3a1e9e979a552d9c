"""Reading FX graphs as Dynamo makes them, and the one way to put a node in.

A value's fake tensor, of the *global* shape, lies in `node.meta["example_value"]`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected
from cpcompile.passes.graph.origins import ORIGIN

# Higher-order operators whose first argument is a sub-graph that runs inline.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint

_META_KEYS = ("stack_trace", "nn_module_stack", "source_fn_stack", ORIGIN)


def fake_value(node: Any) -> Any:
    """The example value of a node; anything that is not a node is its own value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def attribute_value(node: fx.Node) -> Any:
    """The example value of a get_attr node; for a graph that a call runs, that graph.

    Dynamo hands the forward and the backward of an autograd.Function to one operator as
    such graphs.
    """
    value, owner = fake_value(node), node.graph.owning_module
    children = dict(owner.named_modules()) if owner is not None else {}
    return children.get(str(node.target)) if value is None else value


def insert_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    like: fx.Node,
    value: Any,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert a call at the graph's insertion point.

    `like` is the node on whose behalf it stands: its stack trace and module path are
    copied, so that errors and profiles still name the user's line. `value` becomes the
    example value.
    """
    node = graph.call_function(target, args, kwargs or {})
    node.meta = {key: like.meta[key] for key in _META_KEYS if key in like.meta}
    node.meta["example_value"] = value
    return node


def module_path(node: fx.Node) -> str:
    """The module that called this node, "model.layers.0.attn", or "<top level>"."""
    stack = node.meta.get("nn_module_stack") or {}
    path = "" if not stack else next(reversed(stack.values()))[0]
    path = re.sub(r"^[LG]\['\w+'\]\.?", "", path)  # the root: a local or a global
    return path.replace("_modules['", "").replace("']", "") or "<top level>"


def where(node: fx.Node) -> str:
    """Module path and, if known, the user's source line, for messages."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith("File ")]
    return f"{module_path(node)} ({lines[-1]})" if lines else module_path(node)


def sub_graph(node: fx.Node) -> fx.GraphModule | None:
    """The GraphModule that an activation-checkpoint node runs, or None."""
    if node.op != "call_function" or node.target is not CHECKPOINT:
        return None
    region = node.args[0]
    assert isinstance(region, fx.Node) and region.op == "get_attr"
    owner = node.graph.owning_module
    assert owner is not None, "a graph with checkpoint regions belongs to a module"
    module = owner.get_submodule(str(region.target))
    assert isinstance(module, fx.GraphModule)
    return module


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of the graph and of its checkpoint regions, in order of execution."""
    for node in list(graph.nodes):
        region = sub_graph(node)
        if region is not None:
            yield from all_nodes(region.graph)
        else:
            yield node


def all_graphs(graph: fx.Graph) -> Iterator[fx.Graph]:
    """The graph and those of its checkpoint regions."""
    yield graph
    for node in graph.nodes:
        region = sub_graph(node)
        if region is not None:
            yield from all_graphs(region.graph)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of a graph's values."""
    for node in graph.nodes:
        value = fake_value(node)
        local = value.to_local() if isinstance(value, DTensor) else value
        mode = getattr(local, "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    raise AssertionError("a graph with attention has fake tensors")


def storage(node: fx.Node) -> int | None:
    """Which memory a node's example value has: views of one tensor share it."""
    value = fake_value(node)
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor inside of vmap has none
        return None


_VIEWS = frozenset(
    {"T", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as",
     "flatten", "float", "getitem", "mT", "movedim", "narrow", "permute", "reshape",
     "select", "split", "squeeze", "swapaxes", "t", "tensor_split", "to",
     "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view",
     "view_as"}
)  # fmt: skip


def may_be_view(node: fx.Node) -> bool:
    """Whether the result may share memory with the first argument, judged by name."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return name in _VIEWS


_IN_PLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.iand, operator.ior, operator.ixor, operator.ipow,
    operator.imatmul, operator.imod, operator.ilshift, operator.irshift, "__setitem__",
}  # fmt: skip


# Their names end with "_" because they would be keywords of Python.
_KEYWORD_OPERATORS = {operator.and_, operator.or_, operator.not_, operator.is_}


def is_in_place(node: fx.Node) -> bool:
    """Whether a call writes to an argument: by its schema, or by torch's naming."""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    if node.target in _IN_PLACE_OPERATORS or node.target is _TRITON_KERNEL:
        return True
    if node.target in _KEYWORD_OPERATORS:
        return False
    if _schema(node) is not None:
        return bool(_written_by_schema(node))
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return name.endswith("_") and not name.endswith("__")


def written_by(node: fx.Node) -> list[fx.Node]:
    """What an in-place call writes to; of a Triton kernel all that it is given."""
    if node.target is _TRITON_KERNEL:
        return node.all_input_nodes
    found = [node.kwargs.get("out"), *_written_by_schema(node)]
    if _schema(node) is None:
        first = node.args[0] if node.args else node.kwargs.get("input")
        found += first if isinstance(first, list | tuple) else [first]
    return [x for x in found if isinstance(x, fx.Node)]


# Not called by its own name where Dynamo meets a kernel; in torch 2.11 to 2.14.
_TRITON_KERNEL = triton_kernel_wrapper_mutation


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of an operator; of several, that which writes most."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return None
    schemas = [getattr(target, name)._schema for name in target.overloads()]
    return max(schemas, key=lambda schema: len(_writes(schema)), default=None)


def _writes(schema: torch.FunctionSchema) -> list[tuple[int, str]]:
    """Position and name of the arguments that are written, but for `out`."""
    return [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        if not argument.is_out
    ]


def _written_by_schema(node: fx.Node) -> list[Any]:
    schema = _schema(node)
    if schema is None:
        return []
    found: list[Any] = []
    for position, name in _writes(schema):
        given = node.kwargs.get(name)
        if len(node.args) > position:
            given = node.args[position]
        found += given if isinstance(given, list | tuple) else [given]
    return found


def result_is_argument(node: fx.Node) -> bool:
    """Whether all that an in-place call returns is what it writes to."""
    schema = _schema(node)
    return schema is None or all(x.alias_info is not None for x in schema.returns)


def expected_shape(value: Tensor) -> tuple[int, ...]:
    """The shape in this call; a symbol stays one."""
    return tuple(expected(n) for n in value.shape)


def concrete_layout(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides as plain integers; asking a symbol for its value fixes it."""
    return tuple(int(n) for n in value.shape), tuple(int(n) for n in value.stride())
