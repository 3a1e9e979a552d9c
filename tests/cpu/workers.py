"""Sets of gloo processes that run one test case after another.

Starting processes costs seconds and a case costs milliseconds, so a set lives as long
as the test run. A set that lost a case is never used again: a rank may still be inside
a collective, and the next case would meet its messages.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT_SECONDS = 120.0
GROUP_TIMEOUT_SECONDS = 60.0

# How long the other ranks may take to answer once one rank has failed.
GRACE_SECONDS = 2.0


class RankFailed(AssertionError):
    """A rank raised, or its process ended; the message has the rank's traceback."""


class RanksTimedOut(AssertionError):
    """Some ranks gave no answer in time."""


class Pool:
    """`world` processes in one gloo group, started when the first case needs them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Results of `fn(*args)` from all ranks, ordered by rank.

        fn is a module-level function; its file is loaded by path in the processes, so
        that a test file needs not be importable. args and results are pickled.

        Raises: RankFailed, RanksTimedOut. Both end the processes; the next call gets
        fresh ones.
        """
        if not self._processes:
            self._start()
        path = inspect.getsourcefile(fn)
        request = (path, fn.__module__, fn.__name__, pickle.dumps(args))
        try:
            for connection in self._connections:
                connection.send(request)
            return self._answers(f"{fn.__name__} on {self.world} ranks", timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        # The parent holds the store, so its port is free for sure and known at once.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(self.world):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=serve,
                args=(rank, self.world, self._store.port, theirs),
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

    def _answers(self, what: str, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {c: rank for rank, c in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    done, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    done, value = False, self._epitaph(rank)
                if done:
                    answers[rank] = value
                elif not failures:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                else:
                    failures[rank] = value
        if failures:
            rank, text = next(iter(failures.items()))
            others = f"; ranks {sorted(failures)} failed" if len(failures) > 1 else ""
            raise RankFailed(f"{what}: rank {rank} failed first{others}\n{text}")
        if waiting:
            raise RanksTimedOut(
                f"{what}: no answer from ranks {sorted(waiting.values())} "
                f"after {timeout:g} s"
            )
        return [answers[rank] for rank in range(self.world)]

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


def serve(rank: int, world: int, port: int, connection: Connection) -> None:
    """The main function of one process: answer requests until the parent is gone."""
    torch.set_num_threads(1)
    seconds = timedelta(seconds=GROUP_TIMEOUT_SECONDS)
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
    """Run one request; the module comes first, `args` may hold objects of it."""
    fn = getattr(load(path, module), name)
    torch.manual_seed(0)
    return fn(*pickle.loads(args))


@functools.cache
def load(path: str, module: str) -> ModuleType:
    """The file at `path` as the module that the parent knows it as."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None, f"{path} is no module"
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        gc.collect()
        gc.freeze()  # what is imported stays, and is not looked at again
    return sys.modules[module]
