"""The code that torch.compile writes for a GPU, forward and backward, as text.

Nothing of it runs: inputs are fake tensors on a fake GPU, in a fake process group. What
the code computes is shown by tests/kernels/generated_module.py.

Private interfaces of torch, seen in torch 2.13.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.golden.capture import fake_group
from tests.kernels.fake_cuda import fake_cuda
from tests.kernels.generated_module import Argument, Generated, tensors_of

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

static_shapes = functools.partial(torch.compile, dynamic=False)


class _Called(BaseException):
    """The compiled forward is called, with these arguments; nothing can run it."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


def generated_code(
    fn: Callable[..., Any],
    make_inputs: Callable[[str], tuple[Any, ...]],
    *,
    compiler: Compiler = static_shapes,
    rank: int = 1,
    ranks: int = 4,
) -> Generated:
    """The code of `compiler(fn)(*make_inputs("cuda:0"))`, of its first graph.

    Args:
        make_inputs: makes tensors and modules on the device it is given; if one of
            them requires a gradient, there is a backward.
        compiler: is called under the fake GPU and process group.
        rank, ranks: the process group, unless there is one already.
    """
    settings = {"force_disable_caches": True, "fx_graph_cache": False}
    # Padding of matrices is decided by timing them.
    settings |= {"compile_threads": 1, "shape_padding": False}
    graphs: dict[str, GraphLowering] = {}
    sources: dict[str, str] = {}
    returns: dict[str, int] = {}

    def keep(graph: GraphLowering) -> Any:
        name = "backward" if graph.is_backward else "forward"
        assert name not in sources, f"a second {name} before the first graph is called"
        assert not graph.constants, f"constants would be fake: {list(graph.constants)}"
        graphs[name], sources[name] = graph, graph.codegen()[0].value
        returns[name] = TracingContext.get().fw_metadata.num_forward
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []
        return SimpleNamespace(call=lambda _: None)  # never called

    def stop(graph: CompiledFxGraph, arguments: list[Any]) -> None:
        raise _Called(arguments)

    # Dynamo warns that it keeps nothing either.
    quiet = "dynamo_pgo force disabled by torch.compiler.config.force_disable_caches"
    group = nullcontext() if dist.is_initialized() else fake_group(rank, ranks)
    with (
        group,
        fake_cuda(),
        warnings.catch_warnings(),
        mock.patch.object(GraphLowering, "_compile_to_module", keep),
        mock.patch.object(CompiledFxGraph, "__call__", stop),
        inductor_config.patch(settings),
        functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
    ):
        warnings.filterwarnings("ignore", quiet)
        with FakeTensorMode(shape_env=ShapeEnv()):
            inputs = make_inputs("cuda:0")
        torch._dynamo.reset()
        try:
            compiler(fn)(*inputs)
        except _Called as called:
            values = called.arguments
        else:
            raise AssertionError("Inductor had nothing to compile")
        finally:
            torch._dynamo.reset()  # what was compiled here cannot run
    arguments = _arguments(graphs["forward"], values, tensors_of(inputs))
    forward, backward = sources["forward"], sources.get("backward")
    return Generated(forward, backward, arguments, returns["forward"])


def _arguments(
    graph: GraphLowering, values: list[Any], inputs: list[Tensor]
) -> tuple[Argument, ...]:
    """Where each argument of the forward comes from: an input, or a size of one."""
    nodes = list(graph.graph_inputs.values())
    places = {_place(x): index for index, x in enumerate(inputs)}
    indices = [places.get(_place(x)) if isinstance(x, Tensor) else None for x in values]
    sizes: dict[Any, Argument] = {}
    for index, node in zip(indices, nodes, strict=True):
        if index is not None:
            for dim, size in enumerate(node.get_size()):
                sizes.setdefault(size, (index, dim, 1))
    found = [
        (sizes.get(node) or _share(value, inputs)) if index is None else index
        for index, node, value in zip(indices, nodes, values, strict=True)
    ]
    pairs = zip(graph.graph_inputs, found, strict=True)
    other = [x for x, argument in pairs if argument is None]
    assert not other, f"{other}: neither a tensor of make_inputs nor of a size of one"
    return tuple(x for x in found if x is not None)


def _share(value: Any, inputs: list[Tensor]) -> Argument | None:
    """Return the size that all ranks together have, of which one has `value`."""
    places = ((i, dim) for i, x in enumerate(inputs) for dim in range(x.ndim))
    sizes = ((i, dim, int(inputs[i].shape[dim])) for i, dim in places)
    parts = ((i, dim, n // int(value)) for i, dim, n in sizes if not n % int(value))
    return next(parts, None)


def _place(x: Tensor) -> tuple[Any, ...]:
    storage = x.untyped_storage()._cdata
    return storage, x.storage_offset(), tuple(x.shape), x.stride()
