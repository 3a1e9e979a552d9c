"""The ways to run a training step that bench.py compares.

A way is made on every rank, also if it runs on the first one alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

from cpcompile.ops.dtensor.dtensor_sdpa import BACKWARD, FORWARD
from tools.bench.peers.packages import imported, start_deepspeed
from tools.bench.step.models import Inputs, with_places

Passes = Callable[[Inputs], Tensor]  # forward and backward; returns the loss
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Way:
    """How a step runs.

    make: the passes of a model; it may raise whatever a package raises.
    alone: on the first rank only. threads: of a process.
    has_shard: the loss is that of this rank's tokens, and so are the gradients, which
    are averaged over the ranks after the backward.
    """

    name: str
    make: Callable[[nn.Module], Passes]
    alone: bool = False
    threads: int = 1
    has_shard: bool = False


class Training:
    """A model, its optimizer, and a way to run its steps."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        self.way = way
        self.parameters = list(model.parameters())
        self.passes = way.make(model)
        self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE)

    def step(self, inputs: Inputs) -> float:
        """Run forward, backward and optimizer; return the loss of this rank."""
        loss = self.passes(inputs)
        if self.way.has_shard:
            average([p.grad for p in self.parameters])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def all_ways(ranks: int) -> Sequence[Way]:
    """List all ways, in the order in which they take turns.

    AutoSP comes last: its import changes the partitioner of torch for what is compiled
    later.
    """
    return (
        Way("one thread", inductor, alone=True),
        Way("all threads", inductor, alone=True, threads=ranks),
        Way("cp", compiler),
        Way("torch context_parallel", torch_context_parallel, has_shard=True),
        Way("DeepSpeed AutoSP", auto_sp, has_shard=True),
    )


def average(gradients: Sequence[Tensor | None]) -> None:
    """Average gradients over the ranks in place, in one message."""
    found = [x for x in gradients if x is not None]
    flat = torch.cat([x.flatten() for x in found])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([x.numel() for x in found])
    for x, part in zip(found, parts, strict=True):
        x.copy_(part.view_as(x))


def of_program(program: Callable[..., Tensor]) -> Passes:
    """Make the passes of a program that gives the loss of the inputs."""

    def passes(inputs: Inputs) -> Tensor:
        loss = program(**inputs)
        loss.backward()
        return loss

    return passes


def inductor(model: nn.Module) -> Passes:
    """Make the passes of torch.compile on one process."""
    return of_program(torch.compile(model))


def compiler(model: nn.Module) -> Passes:
    """Make the passes of this package."""
    options = {"mesh": mesh_of_ranks()}
    return of_program(torch.compile(model, backend="cp", options=options))


def torch_context_parallel(model: nn.Module) -> Passes:
    """Make the passes of torch's own context, eager.

    It shards the arguments and patches attention.
    """
    passes = of_program(model)

    def sharded(inputs: Inputs) -> Tensor:
        mine = {name: x.clone() for name, x in with_places(inputs).items()}
        buffers = list(mine.values())
        dims = [1] * len(buffers)
        with (
            without_our_handlers(),
            context_parallel(mesh_of_ranks(), buffers=buffers, buffer_seq_dims=dims),
        ):
            return passes(mine)

    return sharded


@contextmanager
def without_our_handlers() -> Iterator[None]:
    """Use DTensor as torch ships it: this package adds CPU attention to it."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    ours = {op: handlers.pop(op, None) for op in (FORWARD, BACKWARD)}
    try:
        yield
    finally:
        handlers |= {op: each for op, each in ours.items() if each is not None}


def auto_sp(model: nn.Module) -> Passes:
    """Make the passes of DeepSpeed's pass over the graph, and Inductor.

    Every attention is one by Ulysses.
    """
    start = imported("deepspeed.compile.init_sp")
    prepare: Any = imported("deepspeed.compile.passes.sp_compile").prepare_autosp_inputs
    start_deepspeed()
    sizes = {"sequence_parallel_size": dist.get_world_size()}
    backend = start.init_autosp(SimpleNamespace(_param_dict=sizes))
    passes = of_program(torch.compile(model, backend=backend))

    def sharded(inputs: Inputs) -> Tensor:
        mine = {name: x.clone() for name, x in with_places(inputs).items()}
        names = ("tokens", "shifted", "positions", "mask")
        prepare(*(mine.get(name) for name in names))
        return passes(mine)

    return sharded


@functools.cache
def mesh_of_ranks() -> DeviceMesh:
    """Make the mesh in which all ranks share the sequence."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
