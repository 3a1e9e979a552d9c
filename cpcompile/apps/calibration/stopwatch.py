"""Time cases on all ranks together, on a machine that does other things as well.

Note [What a timing is]
All ranks run a case at the same time, after a barrier, some times in a row; its time is
from the first rank's start to the last rank's end. On cores that several ranks share
this counts the waiting for a core, which a rank's own clock would miss. Ranks on other
machines have other clocks; then it is the longest time of a rank. Cases take turns.
What else runs on the machine can only add to a time, so the figure of a case is the
median of the fastest quarter of its rounds; how much else ran is recorded.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Case = Callable[[], object]

# A case is repeated until a timing is this long: the end of a barrier is not sharp.
SHORTEST_TIMING_SECONDS = 4e-3
MOST_REPEATS = 64
FEWEST_ROUNDS, MOST_ROUNDS = 4, 40
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Stopwatch:
    """A stopwatch on `device`, together with the other ranks of `group`."""

    group: ProcessGroup
    device: torch.device
    shared_clock: bool
    # For each round: the share of all cores that other processes used.
    foreign_loads: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> Stopwatch:
        """Make a stopwatch; find out whether all ranks are on one machine."""
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(dist.get_rank())
        digest = hashlib.sha256(boot.encode()).digest()[:6]
        number = float(int.from_bytes(digest))  # 48 bits, which float64 has exactly
        watch = cls(group, device, shared_clock=False)
        largest, smallest = watch._reduce([number, -number], dist.ReduceOp.MAX)
        return replace(watch, shared_clock=largest == -smallest)

    def from_first_rank(self, text: str | None) -> str:
        """Send the first rank's text to every rank, as bytes: nothing is unpickled."""
        data = b"" if text is None else text.encode()
        (size,) = self._reduce([float(len(data))], dist.ReduceOp.MAX)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = sent.to(self._where)
        dist.broadcast(sent, group=self.group, group_src=0)
        return bytes(sent.tolist()).decode()

    def medians(self, cases: Sequence[Case], seconds: float) -> list[float]:
        """Measure the seconds of each case, by Note [What a timing is].

        The result is equal on all ranks.

        seconds: about how long to measure; every case is measured some times at least.
        """
        warm = [self.once(case, warm_up=True) for case in cases]
        repeats = [
            min(MOST_REPEATS, math.ceil(SHORTEST_TIMING_SECONDS / max(x, 1e-7)))
            for x in warm
        ]
        of_round = sum(n * x for n, x in zip(repeats, warm, strict=True))
        wanted = int(seconds / max(of_round, 1e-6))
        rounds = []
        for _ in range(max(FEWEST_ROUNDS, min(MOST_ROUNDS, wanted))):
            busy, own, start = _busy_seconds(), time.process_time(), time.perf_counter()
            rounds.append([self.once(*x) for x in zip(cases, repeats, strict=True)])
            busy, own = _busy_seconds() - busy, time.process_time() - own
            (used,) = self._reduce([own], dist.ReduceOp.SUM)
            cores = (os.cpu_count() or 1) * (time.perf_counter() - start)
            foreign = max(0.0, busy - used) / cores if self.shared_clock else 0.0
            self.foreign_loads.extend(self._reduce([foreign], dist.ReduceOp.MAX))
        fastest = (len(rounds) + 3) // 4
        return [
            statistics.median(sorted(x)[:fastest]) for x in zip(*rounds, strict=True)
        ]

    def once(self, case: Case, repeats: int = 1, warm_up: bool = False) -> float:
        """Return the seconds of one run of `case`: the mean of `repeats` in a row."""
        if warm_up:
            case()
        self._synchronize()
        self._reduce([0.0], dist.ReduceOp.MAX)  # dist.barrier would choose a device
        start = time.perf_counter()
        for _ in range(repeats):
            case()
        self._synchronize()
        end = time.perf_counter()
        if not self.shared_clock:
            start, end = 0.0, end - start
        first, last = self._reduce([-start, end], dist.ReduceOp.MAX)
        return (last + first) / repeats

    def _synchronize(self) -> None:
        """Wait for what was launched."""
        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)

    @property
    def on_cpu(self) -> bool:
        """Tell whether what is timed runs on a CPU."""
        return self.device.type == "cpu"

    @property
    def _where(self) -> torch.device:
        """Device of tensors that are sent: with gloo they are in main memory."""
        gloo = dist.get_backend(self.group) == "gloo"
        return torch.device("cpu") if gloo else self.device

    def _reduce(
        self, values: Sequence[float], op: dist.ReduceOp.RedOpType
    ) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64, device=self._where)
        dist.all_reduce(mine, op, group=self.group)
        return [float(x) for x in mine.tolist()]


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked since boot; 0 if unknown."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts = map(
        int, _STAT.read_text().split("\n", 1)[0].split()[1:9]
    )
    ticks = user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")
