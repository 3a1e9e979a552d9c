"""Runs the CUDA code that Inductor wrote on CPU tensors, its kernels interpreted.

Every Triton kernel of the module (template, pointwise, reduction) is executed by
Triton's interpreter on the grid that Inductor would launch; the rest of the module is
executed as it stands, with allocations on the CPU and devices and streams of no effect.
Collectives are real ones, over the process group of the process.

Triton decides at its import whether it interprets, so code is written in one process
(tests/kernels/generated_code.py) and executed in others, those of InterpreterPool.
Private interfaces are those of torch 2.13 and triton 3.9.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import forkserver
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch.utils import _pytree as pytree
from triton.runtime.interpreter import ReduceOps, TensorHandle

from tests.cpu.workers import PRELOADED, Pool
from tests.kernels import interpreter

# An input of the compiled function by its index, or a part of one size of it, such as
# the tokens of a rank: (index, dim, divisor).
Argument = int | tuple[int, int, int]


@dataclass(frozen=True)
class Generated:
    """The code of one compiled graph.

    forward: takes `arguments`; gives `returns` results, then what the backward needs.
    backward: takes that and the gradients of the results; gives those of `arguments`.
        None if no input requires a gradient.
    """

    forward: str
    backward: str | None
    arguments: tuple[Argument, ...]
    returns: int


def tensors_of(inputs: Any) -> list[Tensor]:
    """All tensors in nested inputs, in the order that Generated.arguments counts in."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


class InterpreterPool(Pool):
    """Processes in which Triton kernels are interpreted; see tests.cpu.workers.Pool.

    They are forked from a process of their own: triton reads once whether it is to
    interpret, and other ranks are forked from one in which it is not.
    """

    preloaded = PRELOADED

    def _start(self) -> None:
        environment = {
            "TRITON_INTERPRET": "1",
            "TRITON_FRONT_END_DEBUGGING": "1",  # tracebacks lead into the kernel
            "OPENBLAS_NUM_THREADS": "1",
        }
        own = {
            name: getattr(_SERVER, name)
            for name in ("set_forkserver_preload", "connect_to_new_process")
        }
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.multiple(forkserver, **own),
        ):
            super()._start()


_SERVER = forkserver.ForkServer()


def run(
    generated: Generated,
    inputs: Any,
    gradients: Sequence[Tensor] = (),
) -> tuple[list[Any], list[Tensor | None]]:
    """Execute forward and, if there is one, backward; in a process that interprets.

    Args:
        inputs: as they were for generated_code, but of CPU tensors.
        gradients: of those results of the forward that require one.

    Returns: the results of the forward, and the gradient of every tensor in `inputs`.
        They are those of the graph: what is a view of an input, or written into one,
        is put together by AOTAutograd outside of it.
    """
    tensors = [x.detach() for x in tensors_of(inputs)]
    arguments = [
        tensors[x] if isinstance(x, int) else tensors[x[0]].shape[x[1]] // x[2]
        for x in generated.arguments
    ]
    results = execute(generated.forward, arguments)
    returned, saved = results[: generated.returns], results[generated.returns :]
    found: list[Tensor | None] = [None] * len(tensors)
    if generated.backward is not None:
        # The forward gives sizes last, the backward takes them first.
        saved.sort(key=lambda x: isinstance(x, Tensor))
        results = execute(generated.backward, [*saved, *gradients])
        for argument, gradient in zip(generated.arguments, results, strict=True):
            if isinstance(argument, int):
                found[argument] = gradient
    return returned, found


def execute(code: str, arguments: Sequence[Any]) -> list[Any]:
    """The results of one generated module for CPU arguments; it may change them."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "runs in an InterpreterPool"
    interpreter.install()
    with _on_cpu(), np.errstate(all="ignore"):  # lanes outside of a mask compute too
        module = _load("generated", code)
        module.device = lambda **_: torch.device("cpu")  # device(type='cuda', index=0)
        return list(module.call(list(arguments)))


class _Libdevice:
    """CUDA's library of functions, which has no code for the interpreter: torch's."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        function = getattr(torch, "round" if name in ("nearbyint", "rint") else name)

        def call(*given: tl.tensor | float) -> tl.tensor:
            first, *_ = given
            values = [x.handle.data if isinstance(x, tl.tensor) else x for x in given]
            result = function(*map(torch.as_tensor, values)).numpy()
            dtype = tl.int1 if result.dtype == bool else first.dtype
            is_block = first.type.is_block()
            kind = tl.block_type(dtype, list(result.shape)) if is_block else dtype
            return tl.tensor(TensorHandle(result, dtype), kind)

        return call


def _reduce_by_halves(
    reduction: ReduceOps, inputs: tuple[tl.tensor, ...]
) -> list[tl.tensor]:
    """Instead of ReduceOps.generic_reduce, which calls the function once per element.

    Sizes of blocks are powers of two, and Triton leaves the order open.
    """
    inputs, axis = reduction.unravel(inputs, reduction.axis)
    while inputs[0].shape[axis] > 1:
        halves = [np.split(x.handle.data, 2, axis) for x in inputs]
        arguments = [
            reduction.to_tensor(half[part], x.dtype)
            for part in (0, 1)
            for half, x in zip(halves, inputs, strict=True)
        ]
        combined = reduction.combine_fn.fn(*arguments)
        inputs = combined if isinstance(combined, tuple) else (combined,)
    if reduction.keep_dims:
        return list(inputs)
    return [reduction.to_tensor(x.handle.data.squeeze(axis), x.dtype) for x in inputs]


class _InterpretedKernel:
    """What the code calls a kernel: launched as Inductor would, but interpreted."""

    def __init__(self, function: Any, meta: dict[str, Any], blocks: dict[str, int]):
        self.function, self.meta, self.blocks = function, meta, blocks

    def run(self, *arguments: Any, stream: int) -> None:
        own = [x for x in self.function.arg_names if x not in self.blocks]
        names = [*own, *self.meta.get("extra_launcher_args", ())]
        values = dict(zip(names, arguments, strict=True))
        grid = triton_heuristics.GridExpr.from_meta(self.meta, self.blocks)
        launch = self.function[grid.eval_slow({**values, **self.blocks})]
        launch(**{name: values[name] for name in own}, **self.blocks)


def _interpreted(
    size_hints: Any, configs: list[Any], inductor_meta: dict[str, Any], **_: Any
) -> Callable[[Any], _InterpretedKernel]:
    """Instead of cached_autotune: the configuration with the fewest programs."""
    blocks = max((x.kwargs for x in configs), key=lambda x: x.get("XBLOCK", 0))
    return lambda function: _InterpretedKernel(function, inductor_meta, blocks)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Generated CUDA code that is loaded and called in here runs on the CPU."""

    def kernel(_: Any, name: str, source: str, device_str: str | None = None) -> Any:
        return getattr(_load(name, source), name)

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    with (
        mock.patch.multiple(AsyncCompile, triton=kernel, wait=lambda *_: None),
        mock.patch.object(triton_heuristics, "cached_autotune", _interpreted),
        mock.patch.multiple(
            triton_helpers, set_driver_to_gpu=lambda: None, libdevice=_Libdevice()
        ),
        mock.patch.object(ReduceOps, "generic_reduce", _reduce_by_halves),
        mock.patch("torch._C._dynamo.guards._empty_strided_cuda", empty, create=True),
        mock.patch("torch._C._cuda_getCurrentRawStream", lambda _: 0, create=True),
        mock.patch.multiple(torch.cuda, _DeviceGuard=nullcontext, set_device=int),
    ):
        yield


@functools.cache
def _sources() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process: tracebacks quote from it."""
    return tempfile.TemporaryDirectory()


def _load(name: str, source: str) -> ModuleType:
    """A module of this source; a file, because the interpreter reads the source."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    path = pathlib.Path(_sources().name, f"{name}_{digest[:12]}.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
