"""The sets of processes that tests run on, one for each number of ranks."""

from __future__ import annotations

from cpcompile.apps.verification import processes
from cpcompile.apps.verification.processes import (
    GROUP_TIMEOUT_SECONDS,
    PRELOADED,
    ProcessFailedError,
    ProcessTimeoutError,
)

__all__ = [
    "GROUP_TIMEOUT_SECONDS",
    "PRELOADED",
    "Pool",
    "Pools",
    "ProcessFailedError",
    "ProcessTimeoutError",
]


class Pool(processes.Pool):
    """`world` processes, in which no test finds the program of another."""

    preloaded = (*PRELOADED, "tests.support.nothing_kept")


class Pools(dict[int, Pool]):
    """The set of each world size, made when it is first asked for."""

    def __missing__(self, world: int) -> Pool:
        return self.setdefault(world, Pool(world))

    def close(self) -> None:
        """End all sets."""
        for pool in self.values():
            pool.close()
