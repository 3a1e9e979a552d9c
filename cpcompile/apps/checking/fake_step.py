"""Compile a step of a model as one of several fake ranks; nothing is computed.

    model, inputs  ->  copies without values  ->  backend="cp", results are zeros
                                              ->  reports, warnings, graph breaks

What compiled graphs return are zeros of the right shapes. Sizes are not a matter of
time, and only what the program itself keeps takes memory. Where the program reads a
value, at a graph break, it gets zero.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# What DTensor remembers of meshes, of which two of different groups compare equal;
# seen in 2.13.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes

# The process group that exchanges nothing, which the import registers, and its store;
# seen in 2.11 to 2.15.
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import config
from cpcompile.backend import cp
from cpcompile.compile.no_computation import returns_zeros, zeros_like
from cpcompile.errors import CPError, InputError, OptionError, RewriteError
from cpcompile.logs import warn_once
from cpcompile.reporting import lost_parallelism
from cpcompile.reporting.graph_report import GraphReport, recording
from cpcompile.reporting.ways_out import GraphBreakPlace
from cpcompile.torch_patches import graph_breaks
from cpcompile.torch_private import pytree
from cpcompile.torch_private.dynamo import aot_autograd

RANKS = 4  # as cp.verify starts
_ERROR_LENGTH = 600  # of torch's text for what cannot be compiled


@dataclass(frozen=True)
class FakeStep:
    """What became of one call on one of several ranks.

    graphs: in the order in which they ran. warnings: of cpcompile, in order.
    breaks: of Dynamo's graphs. refused: what a run with strict=True raises.
    """

    graphs: tuple[GraphReport, ...]
    warnings: tuple[str, ...]
    breaks: tuple[GraphBreakPlace, ...]
    refused: str | None = None


@dataclass(frozen=True)
class CheckedCall:
    """A model, the arguments of one call, and how it is compiled.

    options: of the backend, without a mesh. backward: whether gradients are needed.
    hardware: the name of a profile, or None for that of this machine.
    memory: bytes of one rank; None for those of the GPU that the model is on.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any] | None = None
    ranks: int = RANKS
    backward: bool = True
    hardware: str | None = None
    memory: float | None = None

    @property
    def device(self) -> torch.device:
        """The device that the model is on; the CPU for one without memory."""
        device = next((x.device for x in self.model.parameters()), None)
        if device is None or device.type == "meta":
            return torch.device("cpu")
        return device

    def step(self) -> FakeStep:
        """Compile the call; what strict=True refuses runs on gathered tensors.

        Raises: InputError, OptionError; InputError also for a model that does not run,
        and RewriteError for one that torch alone compiles, and cpcompile in no way.
        """
        refused = None
        if (self.options or {}).get("strict", True):
            try:
                return self._compiled(strict=True)
            except (InputError, OptionError):
                raise
            except Exception as error:  # RewriteError, or a mistake in cpcompile
                is_ours = isinstance(error, CPError)
                refused = f"{type(error).__name__}: {error}"
                refused = refused if is_ours else f"a mistake in cpcompile, {refused}"
        try:
            return replace(self._compiled(strict=False), refused=refused)
        except CPError:
            raise
        except Exception as error:  # a mistake in cpcompile
            raise RewriteError(
                f'backend="cp" does not compile {type(self.model).__name__}, and torch '
                f"alone does ({_text(error)}); a mistake in cpcompile, please report it"
            ) from error

    def _compiled(self, strict: bool) -> FakeStep:
        options = dict(self.options or {})
        device, axis = self.device.type, options.get("axis", "cp")
        model, args, kwargs = self._copied()
        with ExitStack() as stack:
            mesh = stack.enter_context(fake_ranks(self.ranks, device, axis))
            warnings = stack.enter_context(warn_once.collected())
            lost_parallelism.forget()
            stack.callback(lost_parallelism.forget)
            for entered in (
                graph_breaks.noted_apart(),
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(self.backward),
                _dynamo_as_new(),
                config.patch(check_ranks=0, profile=None),
            ):
                stack.enter_context(entered)
            if self.hardware is not None:
                stack.enter_context(config.patch(hardware=self.hardware))
            reports = stack.enter_context(recording())
            options |= {"mesh": mesh, "strict": strict}
            backend = partial(cp, computes=False)  # no other call has its programs
            backend.__name__ = "cp"  # type: ignore[attr-defined]  # Dynamo's name for it
            call = torch.compile(model, backend=backend, options=options)
            self._run(call, args, kwargs)
            breaks = tuple(map(GraphBreakPlace.of, graph_breaks.breaks()))
        once = {id(report): report for report in reports}
        return FakeStep(tuple(once.values()), tuple(warnings), breaks)

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:  # whatever a model raises, or torch for it
            inner = getattr(error, "inner_exception", None) or error
            if isinstance(inner, CPError):
                raise inner from None
            if self._runs_alone():  # a mistake of ours
                raise inner from None
            while inner.__cause__ is not None:
                inner = inner.__cause__
            raise InputError(
                f"{type(self.model).__name__} does not run with these inputs under "
                f"torch.compile ({_text(inner)}); needed a model and inputs that run "
                "on one process"
            ) from error

    def _runs_alone(self) -> bool:
        """Tell whether torch compiles the call without cpcompile."""
        model, args, kwargs = self._copied()
        backend = aot_autograd(fw_compiler=returns_zeros, bw_compiler=returns_zeros)
        torch._dynamo.reset()
        try:
            torch.compile(model, backend=backend)(*args, **kwargs)
        except Exception:  # whatever a model raises, or torch for it
            return False
        return True

    def _copied(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return a copy that shares nothing, whose parameters on CPUs are zeros.

        What is on the device "meta" comes to be on the CPU.
        """
        memo: dict[int, Any] = {}
        for parameter in self.model.parameters():
            if type(parameter) is nn.Parameter and _is_cheap(parameter):
                same = nn.Parameter(_zeros_like(parameter), parameter.requires_grad)
                same.__dict__.update(parameter.__dict__)
                memo[id(parameter)] = same
        for buffer in self.model.buffers():
            if buffer.is_meta:
                memo[id(buffer)] = _zeros_like(buffer)
        try:
            model = copy.deepcopy(self.model, memo)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{type(self.model).__name__} cannot be copied ({error}); needed a "
                "model that copy.deepcopy can copy"
            ) from error
        args, kwargs = pytree.tree_map_only(
            Tensor, _copied_input, (self.args, dict(self.kwargs))
        )
        return model, args, kwargs


@contextmanager
def fake_ranks(
    ranks: int, device_type: str = "cpu", axis: str = "cp"
) -> Iterator[DeviceMesh]:
    """Make this process the first of `ranks` ranks, inside of the block.

    Nothing is sent, and what collectives return is not defined.

    Returns: a mesh of one axis with all ranks.

    Raises: InputError in a process group that runs.
    """
    if dist.is_initialized():
        raise InputError(
            f"a process group of {dist.get_world_size()} ranks runs here, which fake "
            "ranks would replace; needed a call before init_process_group, or a "
            "process without one: `cpcompile check my_module:make_model_and_inputs`"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        forget_meshes()
        yield init_device_mesh(device_type, (ranks,), mesh_dim_names=(axis,))
    finally:
        dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook  # torch's one says which rank raises


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), _ERROR_LENGTH)}"


def _is_cheap(x: Tensor) -> bool:
    """Tell whether zeros of this size take no memory until they are written to."""
    return x.is_meta or x.device.type == "cpu"


def _zeros_like(x: Tensor) -> Tensor:
    return zeros_like(x.detach(), torch.device("cpu"))


def _copied_input(x: Tensor) -> Tensor:
    copied = _zeros_like(x) if x.is_meta else x.detach().clone()
    return copied.requires_grad_(x.requires_grad)


@contextmanager
def _dynamo_as_new() -> Iterator[None]:
    """Compile inside of the block as if nothing was compiled before, nor after it.

    Dynamo remembers code that it could not compile, and sizes that have changed.
    """
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            yield
    finally:
        torch._dynamo.reset()
