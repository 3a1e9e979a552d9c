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
# Every peer has a link of its own, 7 of them in a node: MI300X.
MESH = replace(
    MACHINE,
    link_bytes_per_second=10.0,
    collective_bytes_per_second=65.0,
    all_to_all_bytes_per_second=70.0,
)


def gathered(group: Group, machine: object = MACHINE) -> float:
    """Bytes per second."""
    assert isinstance(machine, type(MACHINE))
    return all_gather(machine, group, machine.collective_bytes_per_second)[1]


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
def test_members_and_groups_on_a_node(
    group: Group, members: int, groups_per_node: int
) -> None:
    assert group.on_one_node(MACHINE) == members
    assert group.per_node(MACHINE) == groups_per_node


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(8), (1, 100)),
        (Group(16), (6, 10)),  # between the nodes; inside of them it would be 100
        (Group(4, 8), (6, 10)),  # 8 rings, each with a card
        (Group(4, 2), (1, 100)),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_hop(
    group: Group, expected: tuple[float, float]
) -> None:
    assert message(MACHINE, group) == expected


def test_rings_side_by_side_share_the_cards() -> None:
    assert message(FOUR_CARDS, Group(16)) == (6, 10)  # one rank of a node sends
    assert message(FOUR_CARDS, Group(4, 4)) == (6, 10)
    assert message(FOUR_CARDS, Group(4, 8)) == (6, 5)


def test_a_network_is_no_faster_than_the_link_to_it() -> None:
    slow = replace(MACHINE, link_bytes_per_second=4.0)
    assert message(slow, Group(16)) == (6, 4)


def test_collectives_on_a_node() -> None:
    assert gathered(Group(8)) == 90
    assert all_to_all(MACHINE, Group(8))[1] == 80
    assert all_to_all(MACHINE, Group(4, 2))[1] == 80


def test_an_all_gather_enters_a_node_once() -> None:
    # 8 chunks of the other node come through 4 cards, while 15 arrive at every rank.
    assert gathered(Group(16), FOUR_CARDS) == pytest.approx(4 * 10 * 15 / 8)
    assert gathered(Group(16)) == 90  # through 8 cards it would be 150


def test_an_all_gather_of_one_rank_per_node() -> None:
    assert gathered(Group(4, 8)) == 10
    assert gathered(Group(4, 8), FOUR_CARDS) == 5


def test_an_all_to_all_sends_everything_to_other_nodes_by_its_own_card() -> None:
    # 8 of 15 messages leave the node.
    assert all_to_all(MACHINE, Group(16))[1] == pytest.approx(10 * 15 / 8)
    assert all_to_all(FOUR_CARDS, Group(16))[1] == pytest.approx(5 * 15 / 8)
    assert all_to_all(MACHINE, Group(4, 8))[1] == 10
    # With a fast network, what stays on the node decides: 7 of 15 messages.
    fast = replace(MACHINE, inter_node_bytes_per_second=1e6)
    assert all_to_all(fast, Group(16))[1] == pytest.approx(80 * 15 / 7)


def test_in_a_mesh_few_ranks_have_few_links() -> None:
    assert message(MESH, Group(8)) == (1, 10)
    assert [gathered(Group(n), MESH) for n in (2, 4, 8)] == [10, 30, 65]
    assert [all_to_all(MESH, Group(n))[1] for n in (2, 4, 8)] == [10, 30, 70]
    mi300x = load_profile("mi300x")
    assert message(mi300x, Group(8))[1] < 64e9
    assert all_to_all(mi300x, Group(8))[1] > 4 * message(mi300x, Group(8))[1]


def test_latency_of_collectives() -> None:
    assert all_to_all(MACHINE, Group(1))[0] == 0
    assert [all_to_all(MACHINE, Group(n))[0] for n in (2, 4)] == [2, 3]
    assert all_to_all(MACHINE, Group(2, 8))[0] == 2 + 5


def test_ranks_behind_a_bridge_share_it_in_an_all_to_all() -> None:
    # 12 bytes per second out of two ranks that lie behind one bridge
    pairs = replace(MACHINE, ranks_per_bridge=2.0, bridge_bytes_per_second=12.0)
    assert all_to_all(pairs, Group(2))[1] == 80
    # 2 of 3 messages, 6 of 7, pass it
    assert all_to_all(pairs, Group(4))[1] == pytest.approx(12 / 2 * 3 / 2)
    assert all_to_all(pairs, Group(8))[1] == pytest.approx(12 / 2 * 7 / 6)
    # every message passes it, and so do those of the group beside
    assert all_to_all(pairs, Group(4, 2))[1] == pytest.approx(12 / 2)
    # 7 of 15 messages stay on the node, of which 6 pass the bridge
    assert all_to_all(pairs, Group(16))[1] == pytest.approx(12 / 2 * 15 / 6)
    wide = replace(pairs, bridge_bytes_per_second=1e6)
    assert all_to_all(wide, Group(8))[1] == 80


def test_neighbours_and_all_gathers_do_not_share_a_bridge() -> None:
    pairs = replace(MACHINE, ranks_per_bridge=2.0, bridge_bytes_per_second=12.0)
    assert message(pairs, Group(8)) == message(MACHINE, Group(8))
    assert gathered(Group(8), pairs) == gathered(Group(8))
