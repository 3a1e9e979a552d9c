"""Latency and bandwidth of a group of ranks, by where on the machine they lie.

Ranks 0 to n - 1 lie on the first node, the next n on the second. Inside of a node they
are joined by a switch (the sum of all links to any peer) or by a mesh, where one peer
gets one link: then a collective over few ranks is no faster than its links. Between
nodes a rank uses one network card, and ranks share them if there are fewer: all members
on a node take part in a collective, while of a ring of neighbours one rank per node
sends to another.

Without a switch, ranks of a node may lie behind several host bridges (of a socket, or
of a PCIe switch). Neighbours in a ring, and NCCL's all-gather, a ring as well, send one
message through a bridge at a time; in an all-to-all all ranks behind it send through it
at once, and share its rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpcompile.cost.hardware.profile import HardwareProfile


@dataclass(frozen=True)
class Group:
    """Ranks 0, stride, 2 * stride, ... of the sequence axis."""

    size: int
    stride: int = 1

    def on_one_node(self, profile: HardwareProfile) -> int:
        """Return how many members share a node."""
        return max(1, min(self.size, int(profile.ranks_per_node) // self.stride))

    def per_node(self, profile: HardwareProfile) -> int:
        """Count the groups like this one, side by side, with members on a node."""
        return max(1, min(self.stride, int(profile.ranks_per_node)))

    def behind_one_bridge(self, profile: HardwareProfile) -> tuple[int, int]:
        """Return how many members share a host bridge.

        The second number counts the ranks of all groups like this one that share it.
        """
        behind = int(profile.ranks_per_bridge)
        if behind == 0:
            return self.size, self.size
        near = max(1, min(self.size, behind // self.stride))
        return near, near * max(1, min(self.stride, behind))


def message(profile: HardwareProfile, group: Group) -> tuple[float, float]:
    """Return (seconds, bytes per second) of a hop to the next rank, at the slowest."""
    if group.on_one_node(profile) == group.size:
        return profile.link_latency_seconds, profile.link_bytes_per_second
    return (
        profile.link_latency_seconds + profile.inter_node_latency_seconds,
        min(profile.link_bytes_per_second, _network(profile, group.per_node(profile))),
    )


def all_gather(
    profile: HardwareProfile, group: Group, rate: float
) -> tuple[float, float]:
    """Return (seconds, bytes per second) of an all-gather or a reduce-scatter.

    Bytes are those that a rank sends. rate: inside of a node. A chunk enters a node
    once, and the p members there share the work: (k - p) chunks through p network
    links, for k - 1 that a rank receives.
    """
    size, near = group.size, group.on_one_node(profile)
    inside = min(rate, max(1, near - 1) * profile.link_bytes_per_second)
    if near == size:
        return _latency(profile, group), inside
    senders = near * group.per_node(profile)
    network = near * _network(profile, senders) * (size - 1) / (size - near)
    return _latency(profile, group), min(network, inside if near > 1 else network)


def all_to_all(profile: HardwareProfile, group: Group) -> tuple[float, float]:
    """Return (seconds, bytes sent per second and rank) of an all-to-all.

    What goes to k - p ranks elsewhere passes this rank's own network link, beside what
    goes to the p - 1 others here.
    """
    size, near = group.size, group.on_one_node(profile)
    inside = _all_to_all_inside(profile, Group(near, group.stride))
    if near == size:
        return _latency(profile, group), inside
    senders = near * group.per_node(profile)
    network = _network(profile, senders) * (size - 1) / (size - near)
    if near == 1:
        return _latency(profile, group), network
    return _latency(profile, group), min(network, inside * (size - 1) / (near - 1))


def _all_to_all_inside(profile: HardwareProfile, group: Group) -> float:
    """Return the rate of an all-to-all of ranks of one node."""
    size = group.size
    rate = profile.all_to_all_bytes_per_second
    rate = min(rate, max(1, size - 1) * profile.link_bytes_per_second)
    near, senders = group.behind_one_bridge(profile)
    if near == size:
        return rate
    bridge = profile.bridge_bytes_per_second / senders
    return min(rate, bridge * (size - 1) / (size - near))


def _network(profile: HardwareProfile, senders: int) -> float:
    """Return the network's bytes per second for each of `senders` ranks of a node."""
    cards = min(1.0, profile.network_cards_per_node / senders)
    return cards * profile.inter_node_bytes_per_second


def _latency(profile: HardwareProfile, group: Group) -> float:
    if group.size == 1:
        return 0.0
    seconds = profile.collective_latency_seconds
    seconds += (group.size - 2) * profile.collective_latency_per_rank_seconds
    if group.on_one_node(profile) < group.size:
        seconds += profile.inter_node_latency_seconds
    return seconds
