"""The ranks of a verification: processes of their own, or the group that runs."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import errors
from cpcompile.apps.verification import on_rank
from cpcompile.apps.verification.on_rank import Raised
from cpcompile.apps.verification.processes import PRELOADED, Pool
from cpcompile.apps.verification.steps import ComparedProgram, Reference
from cpcompile.errors import InputError
from cpcompile.settings import setting, setting_names

T = TypeVar("T")

TIMEOUT_SECONDS = 3600.0  # for one part, compilation included
END_SECONDS = 10.0  # for processes to end by themselves


class Ranks(Protocol):
    """A set of ranks that have taken a program."""

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `fn`, a function of on_rank, returns on every rank."""

    def handed(self, reference: Reference) -> Reference | str:
        """Return the reference in a form that `call` can take."""


class _LocalPool(Pool):
    preloaded = (*PRELOADED, "cpcompile.apps.verification.on_rank")


class _LocalProcesses:
    """Processes on this machine, in a gloo group; files carry what is large."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder, self._files = pool, folder, 0

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return _values(self._pool.run(fn, *args, timeout=TIMEOUT_SECONDS))

    def handed(self, reference: Reference) -> str:
        return self.written(pickle.dumps(reference))

    def written(self, data: bytes) -> str:
        """Write the data to a new file; return its path."""
        self._files += 1
        path = self._folder / f"{self._files}.pickle"
        path.write_bytes(data)
        return str(path)


class _RunningGroup:
    """The ranks that run already; every one of them calls this."""

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(*args))
        return _values(results)

    def handed(self, reference: Reference) -> Reference:
        return reference


@contextmanager
def local_processes(program: ComparedProgram, world: int) -> Iterator[Ranks]:
    """Start `world` processes, and end them."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "cp.verify runs while a process that it has started imports the main "
            'module; needed the call under `if __name__ == "__main__":`'
        )
    data = _pickled(program)
    pool = _LocalPool(world, group_timeout=TIMEOUT_SECONDS)
    with tempfile.TemporaryDirectory(prefix="cpcompile_verify_") as folder:
        ranks = _LocalProcesses(pool, Path(folder))
        settings = {name: setting(name) for name in setting_names()}
        try:
            ranks.call(on_rank.load, ranks.written(data), settings)
            yield ranks
        finally:
            pool.close(grace=END_SECONDS)


@contextmanager
def running_group(
    program: ComparedProgram, mesh: DeviceMesh | None, axis: str
) -> Iterator[Ranks]:
    """Yield the ranks of the process group that runs."""
    on_rank.begin(program, mesh, axis)
    try:
        yield _RunningGroup()
    finally:
        on_rank.end()


def _pickled(program: ComparedProgram) -> bytes:
    try:
        return pickle.dumps(program)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"the model or its inputs cannot be pickled ({error}), and the ranks are "
            "processes of their own; needed a model whose class stands at the top of a "
            "module and inputs without open files or lambdas, or a process group that "
            "runs (torchrun)"
        ) from error


def _values(results: list[Any]) -> list[Any]:
    """Return what all ranks return; raise what the first one has raised."""
    raised = [x for x in results if isinstance(x, Raised)]
    if raised:
        # A rank that lost its neighbour says so; what that one says is the cause.
        causes = [x for x in raised if "Connection closed" not in x.text] or raised
        kind = getattr(errors, causes[0].kind, None)
        if kind is not None and kind is not errors.TraceError:
            raise kind(causes[0].text)
        raise RuntimeError(f"{causes[0].kind}: {causes[0].text}")
    return results


def options_without_mesh(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the ranks; each has the mesh itself."""
    return {name: value for name, value in options.items() if name != "mesh"}
