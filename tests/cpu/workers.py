"""The sets of gloo processes that tests run on, one for each number of ranks.

Starting processes costs seconds, so a set lives on between requests. One that lost a
request is never used again: a rank may still be inside a collective, and the next
request would meet its messages.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import math
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT_SECONDS = 120.0
GROUP_TIMEOUT_SECONDS = 60.0

# Imported once, in the process that the ranks are forked from. Not the backend: when it
# is imported a rank says that it is there, and for that it needs its process group.
PRELOADED = (
    "torch.distributed.tensor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "cpcompile.passes.pipeline",
    "cpcompile.reporting.explanation",
)

# How long the other ranks may take to answer once one rank has failed.
GRACE_SECONDS = 2.0


class ProcessFailedError(RuntimeError):
    """A rank raised, or its process ended; the message has the rank's traceback."""


class ProcessTimeoutError(RuntimeError):
    """Some ranks gave no answer in time."""


class Pool:
    """`world` processes in one gloo group, started when the first request needs them.

    No test finds the program of another there.

    group_timeout: seconds after which a collective gives up.
    """

    preloaded: tuple[str, ...] = (*PRELOADED, "tests.support.nothing_kept")

    def __init__(
        self, world: int, group_timeout: float = GROUP_TIMEOUT_SECONDS
    ) -> None:
        self.world = world
        self._group_timeout = group_timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Run `fn(*args)` on all ranks; return the results, ordered by rank.

        fn is a module-level function; its file is loaded by path in the processes, so
        that it needs not be importable. args and results are pickled.

        Raises: ProcessFailedError, ProcessTimeoutError. Both end the processes; the
        next call gets fresh ones.
        """
        try:
            self._ask(fn, args)
            return self._answers(f"{fn.__name__} on {self.world} ranks", timeout)
        except BaseException:
            self.close()
            raise

    def run_until(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float,
        last: Callable[[Any], bool],
        grace: float,
        idle: float,
    ) -> dict[int, Any]:
        """Run as `run` does, but return failures of ranks as ProcessFailedError.

        After a failure, or a result for which `last` is true, the other ranks have
        `grace` seconds; all have `idle` seconds in which none of them computes. Ranks
        without an answer are missing in what is returned. In that case, and after a
        ProcessFailedError, the next call gets fresh processes.
        """
        try:
            self._ask(fn, args)
            answers = self._collect(timeout, last, grace, idle)
        except BaseException:
            self.close()
            raise
        results = {
            r: v if done else ProcessFailedError(v) for r, (done, v) in answers.items()
        }
        if len(results) < self.world or not all(done for done, _ in answers.values()):
            self.close()
        return results

    def close(self, grace: float = 0.0) -> None:
        """End the processes; they have `grace` seconds to end by themselves."""
        for connection in self._connections if grace else ():
            connection.close()  # which they take as the end
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self.preloaded))
        # The parent holds the store, so its port is free for sure and known at once.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self.world, self._store.port, theirs, self._group_timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._answers(f"start of {self.world} ranks", START_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def _ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self._processes:
            self._start()
        path = inspect.getsourcefile(fn)
        request = (path, fn.__module__, fn.__name__, pickle.dumps(args))
        for connection in self._connections:
            connection.send(request)

    def _answers(self, what: str, timeout: float) -> list[Any]:
        answers = self._collect(timeout, lambda value: False, GRACE_SECONDS)
        failures = {rank: text for rank, (done, text) in answers.items() if not done}
        if failures:
            rank, text = next(iter(failures.items()))
            remark = f"; ranks {sorted(failures)} failed" if len(failures) > 1 else ""
            raise ProcessFailedError(
                f"{what}: rank {rank} failed first{remark}\n{text}"
            )
        missing = set(range(self.world)) - answers.keys()
        if missing:
            raise ProcessTimeoutError(
                f"{what}: no answer from ranks {sorted(missing)} after {timeout:g} s"
            )
        return [answers[rank][1] for rank in range(self.world)]

    def _collect(
        self,
        timeout: float,
        last: Callable[[Any], bool],
        grace: float,
        idle: float = math.inf,
    ) -> dict[int, tuple[bool, Any]]:
        """Collect (whether it is a result, result or text) per rank, as they arrive."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        used, since = self._computed(), time.monotonic()
        while waiting:
            remaining = max(deadline - time.monotonic(), 0.0)
            ready: list[Any] = wait(list(waiting), min(remaining, idle / 4))
            if not ready:
                now, still = time.monotonic(), self._computed()
                if now >= deadline or (still == used and now - since > idle):
                    break
                if still != used:
                    used, since = still, now
                continue
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    done, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    done, value = False, self._epitaph(rank)
                answers[rank] = (done, value)
                if not done or last(value):
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def _computed(self) -> float:
        """Return the seconds that main threads and compilers have computed, to a tenth.

        Other threads only watch: a beat per second says nothing of the program.
        """
        if not Path("/proc/self/stat").exists():
            return time.monotonic()  # unknown: as if they never rested
        ticks = 0
        for process in self._processes:
            try:
                of_thread = f"/proc/{process.pid}/task/{process.pid}/stat"
                stat = Path(of_thread).read_text()
            except OSError:  # it ended
                continue
            # utime, stime, and those of children that ended, after the name's bracket
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return round(ticks / os.sysconf("SC_CLK_TCK"), 1)

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1.0)
        return f"its process ended with exit code {process.exitcode}"


class Pools(dict[int, Pool]):
    """The set of each world size, made when it is first asked for."""

    def __missing__(self, world: int) -> Pool:
        return self.setdefault(world, Pool(world))

    def close(self) -> None:
        """End all sets."""
        for pool in self.values():
            pool.close()


def serve(
    rank: int, world: int, port: int, connection: Connection, group_timeout: float
) -> None:
    """Answer requests until the parent is gone: the main function of one process."""
    torch.set_num_threads(1)
    seconds = timedelta(seconds=group_timeout)
    store = dist.TCPStore("127.0.0.1", port, timeout=seconds, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=seconds
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reply = pickle.dumps((True, call(*request)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


def call(path: str, module: str, name: str, args: bytes) -> Any:
    """Run one request; load its module first, as `args` may hold objects of it."""
    fn = getattr(load(path, module), name)
    torch.manual_seed(0)
    return fn(*pickle.loads(args))


@functools.cache
def load(path: str, module: str) -> ModuleType:
    """Load the file at `path` as the module that the parent knows it as."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None, f"{path} is no module"
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        gc.collect()
        gc.freeze()  # what is imported stays, and is not looked at again
    return sys.modules[module]
