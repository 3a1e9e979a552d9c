"""Latency and bandwidth of groups by where their ranks lie, and plans of mixers."""

from dataclasses import replace

import pytest

from cpcompile.cost.hardware.links import Group, all_gather, all_to_all, message
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_planner import plan_mixers
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.cost.plans import Direction
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


def test_groups_meshes_and_latencies() -> None:
    assert groups(CPDegrees(8, 4)) == (Group(4, 8), Group(8))
    assert groups(CPDegrees(8, 4, "ring")) == (Group(4), Group(8, 4))
    assert groups(CPDegrees(1, 8)) == (Group(8), Group(1))
    assert groups(CPDegrees(8, 1)) == (Group(1, 8), Group(8))
    mi300x = load_profile("mi300x")
    assert message(mi300x, Group(8))[1] < 64e9
    assert all_to_all(mi300x, Group(8))[1] > 4 * message(mi300x, Group(8))[1]
    assert all_to_all(MACHINE, Group(1))[0] == 0
    assert [all_to_all(MACHINE, Group(n))[0] for n in (2, 4)] == [2, 3]
    assert all_to_all(MACHINE, Group(2, 8))[0] == 2 + 5


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


EXCHANGE, STATES, GATHER = (
    MixerStrategy.EXCHANGE,
    MixerStrategy.STATES,
    MixerStrategy.GATHER,
)
SIZES = {
    "kind": MixerKind.GATED_DELTA_RULE,
    "batch": 1,
    "tokens": 32768,
    "key_heads": 32,
    "value_heads": 32,
    "key_dim": 128,
    "value_dim": 128,
    "bytes_per_element": 2,
}


def mixer_shape(**changes):
    return MixerShape(**(SIZES | changes))


def planned(ranks=8, direction=Direction.BOTH, hardware="h100_sxm", **changes):
    return plan_mixers(mixer_shape(**changes), load_profile(hardware), ranks, direction)


@pytest.mark.parametrize("kind", MixerKind)
def test_forward_and_backward_add_up(kind):
    changes = {"key_heads": 1} if kind is MixerKind.MAMBA else {}
    plans = [
        dict(planned(direction=d, kind=kind, **changes).seconds) for d in Direction
    ]
    by_direction = dict(zip(Direction, plans, strict=True))
    for strategy, seconds in by_direction[Direction.BOTH].items():
        one = by_direction[Direction.FORWARD][strategy]
        assert one + by_direction[Direction.BACKWARD][strategy] == pytest.approx(
            seconds
        )


def test_one_rank_and_uneven_heads():
    plan = planned(ranks=1)
    assert plan.seconds == ((GATHER, 0.0),) and plan.runner_up is None
    even, uneven = (
        dict(planned(key_heads=n, value_heads=n, ranks=4).seconds)[EXCHANGE] / n
        for n in (12, 13)
    )
    assert uneven > even


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({"ranks": 64, "value_dim": 32}, EXCHANGE),  # few heads, rows and channels
        ({"ranks": 32, "key_heads": 16, "value_dim": 16}, EXCHANGE),  # two head numbers
        ({"tokens": 9}, STATES),  # one rank is left without any
        ({"kind": MixerKind.MAMBA, "key_heads": 1}, STATES),  # takes no state
    ],
)
def test_what_is_not_possible_is_not_priced(changes, strategy):
    assert strategy not in dict(planned(**changes).seconds)


@pytest.mark.parametrize(
    ("changes", "dim"),
    [
        ({}, "heads"),
        ({"value_heads": 4, "key_heads": 4, "batch": 8}, "batch"),
        ({"ranks": 64, "tokens": 64 * 16}, "value channels"),
    ],
)
def test_what_is_exchanged(changes, dim):
    plan = planned(**changes)
    assert (plan.strategy, plan.dim) == (EXCHANGE, dim)


def test_kernels_are_as_fast_as_published():
    """The times of fla that the speeds were fitted to, on H800."""
    for kind, tokens, heads, milliseconds in (
        (MixerKind.GATED_DELTA_RULE, 32768, 64, 4.808),
        (MixerKind.GATED_DELTA_RULE, 8192, 96, 2.033),
        (MixerKind.KDA, 8192, 96, 3.268),
        (MixerKind.KDA, 32768, 16, 2.299),
    ):
        call = mixer_shape(kind=kind, tokens=tokens, key_heads=heads, value_heads=heads)
        seconds = call.forward_seconds(load_profile("h800"))
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15)
