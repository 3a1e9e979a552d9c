"""Make two network namespaces with a link of a limited rate; needs root, ip and tc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SUBNET = "10.77.{}"  # and the process id, so that two runs do not meet
# A bucket of this many seconds at the full rate: what an idle link sends at once.
BURST_SECONDS, SMALLEST_BURST = 1e-3, 16 * 1024
QUEUE = "400ms"  # how long a packet may wait before it is dropped


@dataclass(frozen=True)
class Namespace:
    """One end of the link."""

    name: str
    interface: str
    address: str

    def inside(self, command: list[str]) -> list[str]:
        """Return `command`, to be started inside."""
        return ["ip", "netns", "exec", self.name, *command]


def why_no_namespaces() -> str | None:
    """Say in words what is missing here; None if nothing is."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing (install iproute2)"
    probe = f"cpprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextmanager
def joined_namespaces(megabits: int) -> Iterator[tuple[Namespace, Namespace]]:
    """Join two namespaces by a veth pair; each end sends at most `megabits` per second.

    They are removed at the end, whatever happens.
    """
    process = os.getpid()
    subnet = SUBNET.format(process % 256)
    ends = tuple(
        Namespace(f"cpbench{process}{side}", f"cpb{side}", f"{subnet}.{number}")
        for number, side in enumerate("ab", start=1)
    )
    burst = max(SMALLEST_BURST, int(megabits * 1e6 / 8 * BURST_SECONDS))
    try:
        for end in ends:
            _run("ip", "netns", "add", end.name)
        first, second = ends
        peer = ("peer", "name", second.interface, "netns", second.name)
        _run(
            *f"ip link add {first.interface} netns {first.name} type veth".split(),
            *peer,
        )
        for end in ends:
            here = ("-n", end.name)
            _run("ip", *here, "addr", "add", f"{end.address}/24", "dev", end.interface)
            _run("ip", *here, "link", "set", "lo", "up")
            _run("ip", *here, "link", "set", end.interface, "up")
            _run(
                "tc",
                *here,
                *f"qdisc add dev {end.interface} root tbf".split(),
                *f"rate {megabits}mbit burst {burst} latency {QUEUE}".split(),
            )
        yield first, second
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
