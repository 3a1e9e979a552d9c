"""Tell which ranks still run, as far as another rank can see it.

Every rank writes into the store of the process group on which host and in which process
it runs, and a thread adds every few seconds that it still does. A rank that waits for
another one reads this:

- On its own host it asks the system for the process. So the end of a process is seen at
  once, and a process that is merely busy, or stopped, is never taken for a dead one.
- On another host it watches for the next sign of life. The thread needs Python's lock
  for a moment only, which a compilation hands on all the time; the limit is generous
  for code that keeps it.

A rank that has not written anything yet is not known to be gone.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.torch_private.distributed import get_default_store

BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0

_PREFIX = "cpcompile/heartbeat"

# Tells which of some ranks of a group have ended, and how.
Gone = Callable[[list[int]], dict[int, str]]

# The default group whose store this rank has written to, and what ends its thread.
_world: weakref.ref[ProcessGroup] | None = None
_stop = threading.Event()


def announce() -> None:
    """Say that this rank runs, and go on saying so; once per default process group."""
    global _world, _stop
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    world = dist.group.WORLD
    if world is None or (_world is not None and _world() is world):
        return
    _stop.set()
    _world, _stop = weakref.ref(world), threading.Event()
    key, here = str(dist.get_rank()), _here()
    try:
        # A connection of its own: a wait of another thread would block a shared one.
        own = get_default_store().clone()  # type: ignore[attr-defined]  # no stub
        store = dist.PrefixStore(_PREFIX, own)
        store.set(key, f"{here} 0")
    except dist.DistError:  # the store has ended; who needs it will say so
        return
    stop, world_now = _stop, _world

    def beat() -> None:
        number = 0
        while not stop.wait(BEAT_SECONDS):
            if not dist.is_initialized() or dist.group.WORLD is not world_now():
                return
            number += 1
            try:
                store.set(key, f"{here} {number}")
            except dist.DistError:  # the store has ended; who needs it will say so
                return

    def end() -> None:
        stop.set()
        thread.join(1.0)

    thread = threading.Thread(target=beat, name="cpcompile heartbeat", daemon=True)
    thread.start()
    atexit.register(end)  # before the interpreter ends under the thread


def watch(group: ProcessGroup) -> Gone:
    """Return what tells which of some ranks of the group do not run, and why."""
    store = dist.PrefixStore(_PREFIX, get_default_store())
    last: dict[int, tuple[str, float]] = {}  # sign of life, and when it came

    def gone(ranks: Iterable[int]) -> dict[int, str]:
        reasons = {}
        for rank in ranks:
            key, now = str(dist.get_global_rank(group, rank)), time.monotonic()
            if not store.check([key]):
                continue
            sign = store.get(key).decode()
            if last.setdefault(rank, (sign, now))[0] != sign:
                last[rank] = (sign, now)
            reasons[rank] = _why_gone(sign, now - last[rank][1])
        return {rank: why for rank, why in reasons.items() if why}

    return gone


def _why_gone(sign: str, silent: float) -> str:
    """Return why a rank does not run whose sign of life is so many seconds old."""
    host, process, started, _ = sign.split(" ")
    if host == _host() and host:
        runs = _started(int(process)) == started
        return "" if runs else f"its process {process} on this host has ended"
    silence = f"it gave no sign of life for {SILENT_SECONDS:g} s"
    return silence if silent > SILENT_SECONDS else ""


def _here() -> str:
    """Return host, process and its start; the number alone may be of a new process."""
    process = os.getpid()
    return f"{_host()} {process} {_started(process)}"


def _host() -> str:
    """Name the system and its process namespace; "" where Linux does not say them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(process: int) -> str:
    """Return when a process started, in ticks; "" if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # from the third of proc(5) on
    return "" if fields[0] in "ZX" else fields[19]
