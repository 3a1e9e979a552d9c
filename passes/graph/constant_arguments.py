"""Arguments of calls that are neither nodes nor plain data: meshes, functions, graphs.

torch's cache of programs reads a graph as code, in which every argument is its repr. So
the repr of these values says all that they hold, in the same words in every process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.ranks.digests import byte_vector
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensor


class ConstantArgument:
    """A value that a call of a graph holds.

    label: what `readable` prints of it; None leaves the argument out.
    functions, graphs: what it holds that runs.
    """

    label: str | None = None
    functions: tuple[Callable[..., Any], ...] = ()
    graphs: tuple[fx.GraphModule, ...] = ()

    def text(self) -> str:
        """Return all that the value says, as text."""
        raise NotImplementedError

    def __repr__(self) -> str:  # an expression of Python, as the code of a graph is
        return f"{type(self).__name__}({self.text()!r})"


@dataclass(frozen=True, repr=False, eq=False)
class MeshAxis(ConstantArgument):
    """An axis of a mesh.

    Meshes of one shape are equal to torch, also if the groups of one of them are
    destroyed; here their groups tell them apart.
    """

    mesh: DeviceMesh
    axis: int = 0

    @property
    def size(self) -> int:
        return self.mesh.size(self.axis)

    def text(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        groups = [group.group_name for group in self.mesh.get_all_groups()]
        ranks = self.mesh.mesh.tolist()
        return f"axis {self.axis} of {self.mesh.device_type} {ranks} {groups}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshAxis) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class Method:
    """A tensor method as a function, so that both are treated alike."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.name)(*args, **kwargs)


@dataclass(frozen=True, repr=False)
class Callee(ConstantArgument):
    """A function that a call runs in its own way."""

    function: Callable[..., Any]

    @property
    def label(self) -> str:  # type: ignore[override]
        return function_name(self.function)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:  # type: ignore[override]
        return (self.function,)

    def text(self) -> str:
        if isinstance(self.function, Method | torch._ops.OpOverload):
            return str(self.function)
        if isinstance(self.function, functools.partial):
            partial = self.function
            return f"{Callee(partial.func)} {partial.args} {partial.keywords}"
        module = getattr(self.function, "__module__", None)
        name = getattr(self.function, "__qualname__", self.label)
        return f"{module}.{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, repr=False, eq=False)
class Constant(ConstantArgument):
    """A tensor whose values are known."""

    value: Tensor

    def text(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        value = self.value.detach()
        if isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return f"number {id(self.value)}"  # equal to no other one
        bits = hashlib.sha256(byte_vector(value).numpy().data).hexdigest()
        layout = (value.dtype, tuple(value.shape), value.stride(), value.device)
        return f"{layout} {bits}"


@dataclass(frozen=True, repr=False, eq=False)
class GraphArgument(ConstantArgument):
    """A graph that a call runs."""

    graph: fx.GraphModule

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:  # type: ignore[override]
        return (self.graph,)

    def text(self) -> str:
        return graph_text(self.graph)

    def run(self, *args: Any) -> Any:
        """Run the graph; what its calls hold has no name in the code of a graph."""
        return fx.Interpreter(self.graph).run(*args)


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function as people write it."""
    return str(getattr(function, "__name__", function))


def graph_text(gm: fx.GraphModule) -> str:
    """Return the code of a graph and of those in it, with the values of its tensors."""
    modules = (x for x in gm.named_modules() if isinstance(x[1], fx.GraphModule))
    tensors = (*gm.named_parameters(), *gm.named_buffers())
    lines = [f"{name}: {module.code}" for name, module in modules]
    return "\n".join([*lines, *(f"{name}: {Constant(x)}" for name, x in tensors)])


def constant_arguments_of(gm: fx.GraphModule) -> Iterator[ConstantArgument]:
    """Yield what the calls of a graph hold, and of the graphs in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                for held in pytree.tree_leaves((node.args, node.kwargs)):
                    if isinstance(held, ConstantArgument):
                        yield held
                        for inner in held.graphs:
                            yield from constant_arguments_of(inner)


@dataclass(frozen=True)
class RegionCall:
    """A call to be written in place of the calls of a region.

    program: what the call runs. arguments: its operands, which are nodes before it.
    results: the nodes of the region that are read outside; the call returns a tuple
    with one tensor for each. inside: all nodes of the region, in order. last: the node
    after which the call can stand.
    """

    program: GraphArgument
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    last: fx.Node
