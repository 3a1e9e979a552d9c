"""Read FX graphs as Dynamo makes them, and put nodes in by the one way to do so.

A value's fake tensor, of the *global* shape, lies in `node.meta["example_value"]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    expected,
    is_divided,
    is_symbol,
)
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from .constant_arguments import Method

X = TypeVar("X", bound=Hashable)

# Higher-order operators whose first argument is a sub-graph that runs inline.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint

WHOLE = "cp_whole_value"  # in the meta of a local part: all of the parameter

# In node.meta: the partitioner is to compute a value again in the backward. The tag is
# that of a checkpoint region. A region that reads what is made outside of it would have
# it kept; regions are numbered in order, and one that comes after all others keeps
# nothing for them.
RECOMPUTE_LAST = {
    "recompute": CheckpointPolicy.MUST_RECOMPUTE,
    "ac_graph_id": 2**40,
}

_META_KEYS = (
    *("stack_trace", "nn_module_stack", "source_fn_stack"),
    *RECOMPUTE_LAST,
)


def fake_value(node: Any) -> Any:
    """Return the example value of a node, or x itself if x is no node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def make_objects(graph: fx.Graph) -> None:
    """Give the calls of classes that Dynamo writes for objects their example values.

    It has none for such a call: settings of a function that it does not look into.
    """
    for node in all_nodes(graph):
        if isinstance(node.target, type) and fake_value(node) is None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake_value)
            node.meta["example_value"] = node.target(*args, **kwargs)


def value_of(node: Any) -> Any:
    """Return the fake value of a node of any graph, or x itself if x is no node.

    AOTAutograd's graphs have it as "val".
    """
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("val", node.meta.get("example_value"))


def has_unknown_size(value: Any) -> bool:
    """Tell whether only data tells how many entries a value has."""
    return any(
        isinstance(x, Tensor) and bool(free_unbacked_symbols(tuple(x.shape)))
        for x in pytree.tree_leaves(value)
    )


def whole_value(node: fx.Node) -> Any:
    """Return the example value of a node; the whole parameter for its local part.

    The local part of a parameter is an input of the graph.
    """
    return node.meta.get(WHOLE, fake_value(node))


def attribute_value(node: fx.Node) -> Any:
    """Return the example value of a get_attr node, or the graph that it names.

    A call runs such a graph. Dynamo hands the forward and the backward of an
    autograd.Function to one operator as such graphs.
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
    if isinstance(target, Method):
        node = graph.call_method(target.name, args, kwargs or {})
    else:
        node = graph.call_function(target, args, kwargs or {})
    node.meta = {key: like.meta[key] for key in _META_KEYS if key in like.meta}
    node.meta["example_value"] = value
    return node


def module_path(node: fx.Node) -> str:
    """Return the module that called this node: "model.layers.0.attn" or "<top level>".

    A call that autograd makes of another call has the path of that call.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    path = re.sub(r"^[LG]\['\w+'\]\.?", "", path)  # the root: a local or a global
    path = path.replace("__dict__['_modules']['", "")  # of a __getattr__ of its own
    return path.replace("_modules['", "").replace("']", "") or "<top level>"


def reached(
    starts: Iterable[X], following: Callable[[X], Iterable[X]]
) -> dict[X, None]:
    """Return these and all that follows from them, each once, in an order."""
    found = dict.fromkeys(starts)
    waiting = [*found]
    while waiting:
        for x in following(waiting.pop()):
            if x not in found:
                found[x] = None
                waiting.append(x)
    return found


def where(node: fx.Node) -> str:
    """Return module path and, if known, the user's source line, for messages."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith("File ")]
    return f"{module_path(node)} ({lines[-1]})" if lines else module_path(node)


def sub_graph(node: fx.Node) -> fx.GraphModule | None:
    """Return the GraphModule that an activation-checkpoint node runs, or None."""
    if node.op != "call_function" or node.target is not CHECKPOINT:
        return None
    region = node.args[0]
    assert isinstance(region, fx.Node) and region.op == "get_attr"
    owner = node.graph.owning_module
    assert owner is not None, "a graph with checkpoint regions belongs to a module"
    module = owner.get_submodule(str(region.target))
    assert isinstance(module, fx.GraphModule)
    return module


def output_nodes(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the results of the graph, in order."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    assert isinstance(results, tuple | list), "Dynamo's graphs return a tuple"
    return tuple(results)


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of the graph and of its checkpoint regions in execution order.

    A node that runs a region is not among them.
    """
    for node in list(graph.nodes):
        region = sub_graph(node)
        if region is not None:
            yield from all_nodes(region.graph)
        else:
            yield node


def all_graphs(graph: fx.Graph) -> Iterator[fx.Graph]:
    """Yield the graph and the graphs of its checkpoint regions."""
    yield graph
    for node in graph.nodes:
        region = sub_graph(node)
        if region is not None:
            yield from all_graphs(region.graph)


def region_arguments(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the inputs of checkpoint regions, and what they are outside."""
    for subgraph in all_graphs(graph):
        for node in subgraph.nodes:
            region = sub_graph(node)
            if region is not None:
                inner = region.graph.find_nodes(op="placeholder")
                for placeholder, argument in zip(inner, node.args[1:], strict=True):
                    if isinstance(argument, fx.Node):
                        yield placeholder, argument


def has_tensors(graph: fx.Graph) -> bool:
    """Tell whether any value is a tensor; after a graph break all may be sizes."""
    return any(isinstance(fake_value(node), Tensor) for node in graph.nodes)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode of a graph's values."""
    for node in graph.nodes:
        value = fake_value(node)
        local = value.to_local() if isinstance(value, DTensor) else value
        mode = getattr(local, "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    raise AssertionError("a graph with attention has fake tensors")


def storage(node: fx.Node) -> int | None:
    """Identify the memory of a node's example value: views of one tensor share it.

    None if the value has no memory.
    """
    value = fake_value(node)
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor inside of vmap has none
        return None


def plain_fake(value: Any) -> Any:
    """Return a plain fake tensor with the global shape of a fake DTensor.

    Other values are returned as they are. For traces of the global program.
    """
    if not isinstance(value, DTensor):
        return value
    mode = getattr(value.to_local(), "fake_mode", None)
    assert isinstance(mode, FakeTensorMode), "Dynamo's values are fake"
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def expected_shape(value: Tensor) -> tuple[int, ...]:
    """Return the shape that a value has in this call; its symbols are not fixed."""
    return tuple(expected(n) for n in value.shape)


def concrete_layout(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides as plain integers.

    To ask a symbol for its value fixes it.
    """
    return tuple(int(n) for n in value.shape), tuple(int(n) for n in value.stride())


def layout_outside(
    value: DTensor,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return global shape and strides, or None for what follows from equal shards.

    Raises: LengthNotSymbolic if a size is a symbol and shards are unequal.
    """
    if not any(map(is_symbol, (*value.shape, *value.stride()))):
        return concrete_layout(value)
    for axis, placement in enumerate(value.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and not is_divided(
            value.shape[dim], value.device_mesh.size(axis)
        ):
            raise LengthNotSymbolic(
                f"a DTensor of shape {list(value.shape)} with placements "
                f"{value.placements} at the edge of the graph has unequal shards"
            )
    return None, None


def sort_calls(graph: fx.Graph) -> None:
    """Put every call after its operands, and otherwise keep the order."""
    waiting: dict[fx.Node, list[fx.Node]] = {}
    done: set[fx.Node] = set()
    last: fx.Node | None = None
    for start in list(graph.nodes):
        ready = [start]
        while ready:
            node = ready.pop()
            missing = next((x for x in node.all_input_nodes if x not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(node)
                continue
            if last is not None:
                last.append(node)
            last = node
            done.add(node)
            ready += reversed(waiting.pop(node, []))


class Regions:
    """The checkpoint regions of a graph and the calls that run them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._calls: dict[fx.Graph, fx.Node] = {}
        self._runs: Counter[fx.Graph] = Counter()
        self._brought: dict[tuple[fx.Graph, fx.Node], fx.Node] = {}
        self._enter(graph)

    def _enter(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            region = sub_graph(node)
            if region is not None:
                self._calls[region.graph] = node
                self._runs[region.graph] += 1
                self._enter(region.graph)

    def is_shared(self, graph: fx.Graph) -> bool:
        """Tell whether a graph is run by several calls, or is inside of one that is."""
        while graph is not self.graph:
            if self._runs[graph] > 1:
                return True
            graph = self._calls[graph].graph
        return False

    def anchor(self, node: fx.Node) -> fx.Node:
        """Return the node of the outermost graph in which `node` runs."""
        while node.graph is not self.graph:
            node = self._calls[node.graph]
        return node

    def bring_in(self, node: fx.Node, graph: fx.Graph) -> fx.Node:
        """Pass a node of the outermost graph to a region, and return the argument."""
        if graph is self.graph:
            return node
        key = (graph, node)
        if key not in self._brought:
            call = self._calls[graph]
            outside = self.bring_in(node, call.graph)
            last = graph.find_nodes(op="placeholder")[-1:]
            first = next(iter(graph.nodes))
            with (
                graph.inserting_after(last[0])
                if last
                else graph.inserting_before(first)
            ):
                inside = graph.placeholder(node.name)
            inside.meta["example_value"] = fake_value(node)
            call.args = (*call.args, outside)
            self._brought[key] = inside
            assert graph.owning_module is not None
            graph.owning_module.recompile()
        return self._brought[key]


def memory_order(value: Any) -> tuple[int, ...] | None:
    """Return the dimensions of a (first) result by strides; None if in that order."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    if not tensors:
        return None
    shape, strides = tensors[0].shape, tensors[0].stride()
    dims = [dim for dim, size in enumerate(shape) if expected(size) != 1]
    in_memory = sorted(dims, key=lambda dim: -expected(strides[dim]))
    if in_memory == dims:
        return None
    ones = (dim for dim in range(len(shape)) if dim not in dims)
    return (*ones, *in_memory)
