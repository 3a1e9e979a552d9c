"""The ranks of a verification: processes of their own, or the group that runs."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from cpcompile import config, errors
from cpcompile.apps.verification.steps import ComparedProgram
from cpcompile.errors import InputError
from cpcompile.settings import setting, setting_names

WORLD = 4  # local processes, unless said otherwise
TIMEOUT = timedelta(hours=1)  # of a collective, while another rank compiles

# Imported once, in the process that the ranks are forked from. Not the backend: when it
# is imported a rank says that it is there, and for that it needs its process group.
PRELOADED = (
    "torch.distributed.tensor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "cpcompile.passes.pipeline",
    "cpcompile.reporting.explanation",
    "cpcompile.apps.verification.on_rank",
)


def told(is_shown: bool) -> Callable[[str], None]:
    """Return a function that prints to stderr what begins now, if it is to."""
    return partial(print, file=sys.stderr, flush=True) if is_shown else lambda _: None


@dataclass(frozen=True)
class _Raised:
    """An exception of a rank, as data, as errors of Dynamo cannot be sent."""

    kind: str
    text: str

    @property
    def is_cause(self) -> bool:
        """False if this rank only says that it has lost another one."""
        return "by peer" not in self.text


class Ranks:
    """The ranks of the process group that runs, or of local processes.

    world: how many are asked for. options: of the backend, which may have a mesh.
    """

    def __init__(self, world: int | None, options: Mapping[str, Any]) -> None:
        self._running = dist.get_world_size() if dist.is_initialized() else None
        self.world = (self._running or WORLD) if world is None else world
        self._mesh: DeviceMesh | None = options.get("mesh")
        self._axis = options.get("axis", "cp")
        if type(self.world) is not int or self.world < 2:
            raise InputError(f"got world={world!r}; needed at least 2 ranks to compare")
        if self._running not in (None, self.world):
            raise InputError(
                f"got world={world}, and the process group that runs has "
                f"{self._running} ranks; needed world={self._running}, or a call "
                "before init_process_group"
            )
        if self._mesh is None and not isinstance(self._axis, str):
            raise InputError(
                f"options['axis'] is {self._axis!r}, two axes; needed a mesh with "
                "both, in a process group that runs (torchrun)"
            )
        if self._mesh is not None and self._running is None:
            raise InputError(
                "options['mesh'] is given, and no process group runs; leave it away"
            )

    def run(
        self, fn: Callable[..., Any], program: ComparedProgram, *args: Any
    ) -> list[Any]:
        """Return fn(copy of the program, mesh, *args) of every rank.

        Of a group that runs, all ranks have to call this together.
        """
        if self._running is None:
            return _values(self._on_processes(fn, program, *args))
        results: list[Any] = [None] * self.world
        own = _returned(fn, program, self._mesh, self._axis, *args)
        dist.all_gather_object(results, own)
        return _values(results)

    def _on_processes(self, *request: Any) -> list[Any]:
        settings = {name: setting(name) for name in setting_names()}
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            list(PRELOADED)
        )
        with tempfile.TemporaryDirectory(prefix="cpcompile_verify_") as folder:
            data = _pickled((settings, self._axis, *request))
            (Path(folder) / "request").write_bytes(data)
            processes = start_processes(
                _serve,
                (self.world, folder),
                self.world,
                join=False,
                daemon=True,
                start_method="forkserver",
            )
            ended = None
            try:
                while not processes.join():
                    pass
            except (ProcessExitedException, ProcessRaisedException) as error:
                ended = error
            replies = sorted(Path(folder).glob("rank *"))
            results = [pickle.loads(path.read_bytes()) for path in replies]
        if ended and not any(isinstance(x, _Raised) and x.is_cause for x in results):
            raise RuntimeError(str(ended)) from ended
        return results


def _serve(rank: int, world: int, folder: str) -> None:
    """Run a request on one rank: the main function of its process."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, TIMEOUT, world, rank)
    data = (Path(folder) / "request").read_bytes()
    settings, axis, fn, program, *args = pickle.loads(data)
    for name, value in settings.items():
        setattr(config, name, value)
    result = _returned(fn, program, None, axis, *args)
    (Path(folder) / f"rank {rank:06}").write_bytes(pickle.dumps(result))
    if isinstance(result, _Raised):
        sys.exit(1)  # which ends the others, too


def _returned(
    fn: Callable[..., Any],
    program: ComparedProgram,
    mesh: DeviceMesh | None,
    axis: str,
    *args: Any,
) -> Any:
    """Return what fn returns, or what it raises; without a mesh, make one of all."""
    try:
        own = program.copied()
        device = next((x.device.type for x in own.model.parameters()), "cpu")
        if mesh is None:
            shape = (dist.get_world_size(),)
            mesh = init_device_mesh(device, shape, mesh_dim_names=(axis,))
        return fn(own, mesh, *args)
    except Exception as error:  # whatever a model makes torch raise
        inner = getattr(error, "inner_exception", None) or error
        return _Raised(type(inner).__name__, str(inner))


def _pickled(request: Any) -> bytes:
    try:
        return pickle.dumps(request)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"the model or its inputs cannot be pickled ({error}), and the ranks are "
            "processes of their own; needed a model whose class stands at the top of a "
            "module and inputs without open files or lambdas, or a process group that "
            "runs (torchrun)"
        ) from error


def _values(results: list[Any]) -> list[Any]:
    """Return what all ranks return; raise what the first one has raised."""
    raised = [x for x in results if isinstance(x, _Raised)]
    if raised:
        first = next((x for x in raised if x.is_cause), raised[0])
        kind = getattr(errors, first.kind, None)
        if kind is not None:
            raise kind(first.text)
        raise RuntimeError(f"{first.kind}: {first.text}")
    return results
