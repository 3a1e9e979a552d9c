"""Latency and bandwidth of groups by where their ranks lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpcompile.cost.hardware.links import Group, all_gather, all_to_all, message
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.symbols import groups
from cpcompile.geometry.degrees import CPDegrees

# Links 100, collectives 90 and 80; 10 per card between nodes of 8; no latencies.
MACHINE = replace(
    load_profile("h100_sxm"),
    link_bytes_per_second=100.0,
    collective_bytes_per_second=90.0,
    all_to_all_bytes_per_second=80.0,
    inter_node_bytes_per_second=10.0,
    network_cards_per_node=8.0,
    ranks_per_node=8.0,
    link_latency_seconds=1.0,
    collective_latency_seconds=2.0,
    collective_latency_per_rank_seconds=0.5,
    inter_node_latency_seconds=5.0,
)
FOUR_CARDS = replace(MACHINE, network_cards_per_node=4.0)
MESH = replace(
    MACHINE,
    link_bytes_per_second=10.0,
    collective_bytes_per_second=65.0,
    all_to_all_bytes_per_second=70.0,
)
# 12 bytes per second out of two ranks that lie behind one bridge
PAIRS = replace(MACHINE, ranks_per_bridge=2.0, bridge_bytes_per_second=12.0)


def test_groups_of_a_factorisation() -> None:
    assert groups(CPDegrees(8, 4)) == (Group(4, 8), Group(8))
    assert groups(CPDegrees(8, 4, "ring")) == (Group(4), Group(8, 4))
    assert groups(CPDegrees(1, 8)) == (Group(8), Group(1))
    assert groups(CPDegrees(8, 1)) == (Group(1, 8), Group(8))


@pytest.mark.parametrize(
    ("group", "members", "groups_per_node"),
    [
        (Group(8), 8, 1),
        (Group(16), 8, 1),
        (Group(4, 8), 1, 8),  # one on each node
        (Group(4, 4), 2, 4),
        (Group(4, 2), 4, 2),
        (Group(2, 16), 1, 8),
    ],
)
def test_members_and_groups_on_a_node(group, members, groups_per_node) -> None:
    assert group.on_one_node(MACHINE) == members
    assert group.per_node(MACHINE) == groups_per_node


@pytest.mark.parametrize(
    ("machine", "group", "expected"),
    [
        (MACHINE, Group(8), (1, 100)),
        (MACHINE, Group(16), (6, 10)),  # between the nodes; inside it would be 100
        (MACHINE, Group(4, 8), (6, 10)),  # 8 rings, each with a card
        (MACHINE, Group(4, 2), (1, 100)),
        (FOUR_CARDS, Group(16), (6, 10)),  # one rank of a node sends
        (FOUR_CARDS, Group(4, 4), (6, 10)),
        (FOUR_CARDS, Group(4, 8), (6, 5)),  # side by side they share the cards
        (replace(MACHINE, link_bytes_per_second=4.0), Group(16), (6, 4)),
        (MESH, Group(8), (1, 10)),
        (PAIRS, Group(8), (1, 100)),  # neighbours do not share a bridge
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_hop(machine, group, expected) -> None:
    assert message(machine, group) == expected


@pytest.mark.parametrize(
    ("machine", "group", "rate"),
    [
        (MACHINE, Group(8), 90),
        # 8 chunks of the other node come through 4 cards, while 15 arrive at all ranks.
        (FOUR_CARDS, Group(16), 4 * 10 * 15 / 8),
        (MACHINE, Group(16), 90),  # through 8 cards it would be 150
        (MACHINE, Group(4, 8), 10),
        (FOUR_CARDS, Group(4, 8), 5),
        (MESH, Group(2), 10),
        (MESH, Group(4), 30),
        (MESH, Group(8), 65),
        (PAIRS, Group(8), 90),
    ],
)
def test_an_all_gather_enters_a_node_once(machine, group, rate) -> None:
    found = all_gather(machine, group, machine.collective_bytes_per_second)[1]
    assert found == pytest.approx(rate)


@pytest.mark.parametrize(
    ("machine", "group", "rate"),
    [
        (MACHINE, Group(8), 80),
        (MACHINE, Group(4, 2), 80),
        (MACHINE, Group(16), 10 * 15 / 8),  # 8 of 15 messages leave, by the own card
        (FOUR_CARDS, Group(16), 5 * 15 / 8),
        (MACHINE, Group(4, 8), 10),
        # With a fast network, what stays on the node decides: 7 of 15 messages.
        (replace(MACHINE, inter_node_bytes_per_second=1e6), Group(16), 80 * 15 / 7),
        (MESH, Group(2), 10),
        (MESH, Group(4), 30),
        (MESH, Group(8), 70),
        (PAIRS, Group(2), 80),
        (PAIRS, Group(4), 12 / 2 * 3 / 2),  # 2 of 3 messages pass the bridge
        (PAIRS, Group(8), 12 / 2 * 7 / 6),
        # every message passes it, and so do those of the group beside
        (PAIRS, Group(4, 2), 12 / 2),
        # 7 of 15 messages stay on the node, of which 6 pass the bridge
        (PAIRS, Group(16), 12 / 2 * 15 / 6),
        (replace(PAIRS, bridge_bytes_per_second=1e6), Group(8), 80),
    ],
)
def test_an_all_to_all_shares_cards_and_bridges(machine, group, rate) -> None:
    assert all_to_all(machine, group)[1] == pytest.approx(rate)


def test_in_a_mesh_few_ranks_have_few_links() -> None:
    mi300x = load_profile("mi300x")
    assert message(mi300x, Group(8))[1] < 64e9
    assert all_to_all(mi300x, Group(8))[1] > 4 * message(mi300x, Group(8))[1]


def test_latency_of_collectives() -> None:
    assert all_to_all(MACHINE, Group(1))[0] == 0
    assert [all_to_all(MACHINE, Group(n))[0] for n in (2, 4)] == [2, 3]
    assert all_to_all(MACHINE, Group(2, 8))[0] == 2 + 5
