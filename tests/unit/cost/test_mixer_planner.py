"""Mixers that are planned by their shapes: choice, bytes, exclusions, errors."""

import json
import random
from dataclasses import replace

import pytest

import cpcompile as cp
from cpcompile.cost.hardware.profile import profile_names
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_planner import choose_mixer, states_win_from
from cpcompile.cost.mixer_shapes import KernelWork, MixerKind
from cpcompile.cost.plain_data import to_dict
from cpcompile.cost.plans import Direction

EXCHANGE, STATES, GATHER = (
    MixerStrategy.EXCHANGE,
    MixerStrategy.STATES,
    MixerStrategy.GATHER,
)


def planned(**changes):
    sizes = {
        "kind": "gated_delta_rule",
        "seq": 32768,
        "ranks": 8,
        "value_heads": 32,
        "value_dim": 128,
    }
    return cp.plan_mixer(**(sizes | changes))


def candidate(plan, strategy):
    (found,) = (c for c in plan.candidates if c.strategy is strategy)
    return found


def random_plans(count):
    """Plans of random shapes, the same in every run."""
    draw = random.Random(0)
    for _ in range(count):
        key_heads = draw.choice([8, 16, 64])
        yield planned(
            kind=draw.choice(["gated_delta_rule", "kda", "linear_attention"]),
            batch=draw.choice([1, 3]),
            ranks=draw.choice([2, 4, 8]),
            key_heads=key_heads,
            value_heads=key_heads * draw.choice([1, 2]),
            key_dim=draw.choice([64, 128]),
            value_dim=draw.choice([64, 128]),
            hardware=draw.choice(profile_names()),
            work=draw.choice(["operands", "chunks"]),
            direction=draw.choice(["forward", "backward", "both"]),
        )


def longer(plan, factor):
    shape = replace(plan.shape, tokens=factor * plan.shape.tokens)
    return choose_mixer(shape, plan.profile, plan.ranks, plan.direction, plan.work)


@pytest.mark.parametrize("plan", random_plans(12), ids=str)
def test_bytes_of_states_do_not_depend_on_the_length_and_others_grow_with_it(plan):
    one, four = (
        {c.strategy: c.wire_bytes for c in x.candidates}
        for x in (plan, longer(plan, 4))
    )
    assert four[STATES] == one[STATES] > 0
    assert four[EXCHANGE] == pytest.approx(4 * one[EXCHANGE])
    assert four[GATHER] == pytest.approx(4 * one[GATHER])


def test_bytes_of_states():
    """B, A, and two gradients of states, of seven other ranks, in float32."""
    plan = planned(key_dim=64)
    state, mixed = 32 * 64 * 128 * 4, 32 * 64 * 64 * 4
    assert candidate(plan, STATES).wire_bytes == 7 * (3 * state + mixed)
    decays = planned(kind="mamba2", key_dim=64, key_heads=1)
    assert candidate(decays, STATES).wire_bytes == 7 * 4 * state


def test_bytes_of_an_exchange():
    """q, k, v, the result and two gates, 7 of 8 parts of an eighth, and back."""
    plan = planned(key_heads=16)
    numbers = 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32
    sent = 2 * numbers * 32768 * 2 / 8 * 7 / 8
    assert candidate(plan, EXCHANGE).wire_bytes == sent


def test_what_all_heads_read_is_gathered():
    """B and C of one group of mamba2."""
    plan = planned(kind="mamba2", key_heads=1, key_dim=64, value_dim=64)
    exchanged = (2 * 32 * 64 + 32) * 2 / 8 * 7 / 8
    gathered = 2 * 64 * 2 * 7 / 8
    sent = 2 * 32768 * (exchanged + gathered)
    assert candidate(plan, EXCHANGE).wire_bytes == sent


def test_forward_and_backward_add_up():
    plans = [planned(direction=d) for d in ("forward", "backward", "both")]
    for strategy in MixerStrategy:
        one, other, both = (candidate(p, strategy) for p in plans)
        assert one.wire_bytes + other.wire_bytes == both.wire_bytes
        assert one.seconds + other.seconds == pytest.approx(both.seconds)


def test_one_rank_exchanges_nothing():
    plan = planned(ranks=1, work="chunks")
    assert plan.strategy is GATHER and plan.runner_up is None
    assert plan.chosen.wire_bytes == 0
    assert plan.chosen.beyond_share == 0
    assert {c.excluded for c in plan.candidates[1:]} == {"one rank has all tokens"}


@pytest.mark.parametrize(
    ("changes", "strategy", "reason"),
    [
        ({"ranks": 64, "value_dim": 32}, EXCHANGE,
         "32 heads leave one of 64 ranks without any; batch 1 leaves one rank without "
         "a row; 32 value channels leave one rank without any"),
        ({"ranks": 32, "key_heads": 16, "value_dim": 16}, EXCHANGE,
         "16 key and 32 value heads are not both multiples of 32 ranks (repeat keys "
         "for every value head); batch 1 leaves one rank without a row; 16 value "
         "channels leave one rank without any"),
        ({"seq": 9, "ranks": 8}, STATES, "9 tokens leave one of 8 ranks without any"),
        ({"kind": "mamba"}, STATES,
         "functions of mamba take no state to begin with"),
    ],
)  # fmt: skip
def test_what_is_not_possible_has_a_reason(changes, strategy, reason):
    plan = planned(**changes)
    out = candidate(plan, strategy)
    assert out.excluded == reason
    assert out.seconds is out.wire_bytes is None
    assert strategy not in dict(plan.seconds)
    assert reason in plan.table()
    with pytest.raises(ValueError, match="is not possible for"):
        planned(**changes, strategy=strategy.value)


def test_rows_of_a_batch_take_the_place_of_heads():
    plan = planned(value_heads=4, batch=8, strategy="exchange")
    assert plan.dim == "batch" and plan.forced


def test_uneven_heads_cost_the_work_of_the_largest_part():
    even, uneven = (
        candidate(planned(value_heads=n, ranks=4, work="chunks"), EXCHANGE)
        for n in (12, 13)
    )
    # A rank has four of 13 heads, which are 3.25 on average.
    assert uneven.seconds / even.seconds > 13 / 12
    assert uneven.beyond_share > even.beyond_share


@pytest.mark.parametrize("hardware", profile_names())
@pytest.mark.parametrize("work", list(KernelWork))
def test_states_win_from_the_tokens_that_are_named(hardware, work):
    plan = planned(ranks=16, hardware=hardware, work=work.value)
    tokens = states_win_from(plan.shape, plan.profile, 16, work=work)
    lengths = {2**24: tokens is not None}
    if tokens is not None:
        lengths[round(1.02 * tokens) + 1] = True
    if tokens:
        lengths[round(0.98 * tokens)] = False
    for per_rank, win in lengths.items():
        shape = replace(plan.shape, tokens=16 * per_rank)
        prices = dict(choose_mixer(shape, plan.profile, 16, work=work).seconds)
        assert (prices[STATES] < prices[EXCHANGE]) == win, per_rank


def test_states_cannot_win_where_one_of_both_is_not_possible():
    """Neither heads nor channels of values suffice."""
    plan = planned(ranks=64, value_dim=32)
    assert states_win_from(plan.shape, plan.profile, 64) is None


def test_kernels_are_as_fast_as_published():
    """The times of fla that the speeds were fitted to, on H800."""
    for kind, seq, heads, milliseconds in (
        ("gated_delta_rule", 32768, 64, 4.808),
        ("gated_delta_rule", 8192, 96, 2.033),
        ("kda", 8192, 96, 3.268),
        ("kda", 32768, 16, 2.299),
    ):
        plan = planned(
            kind=kind, seq=seq, value_heads=heads, ranks=1, hardware="h800",
            direction="forward", work="chunks",
        )  # fmt: skip
        assert 1e3 * plan.chosen.seconds == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize("kind", [k.value for k in MixerKind])
@pytest.mark.parametrize("work", [w.value for w in KernelWork])
def test_every_kind_can_be_planned_printed_and_written(kind, work):
    plan = planned(kind=kind, work=work)
    first, second, empty, decision, header, *rows = str(plan).splitlines()
    assert first.startswith(f"{kind}: 32768 tokens, batch 1, ")
    assert second.startswith("predicted for h100_sxm, 8 ranks per node; the kernel ")
    assert empty == ""
    assert decision.startswith(f"8 ranks: {plan.strategy.value}")
    assert header.split()[0] == "strategy"
    assert [row[0] for row in rows] == [">", " ", " "]
    record = json.loads(json.dumps(to_dict(plan)))
    assert record["strategy"] == plan.strategy.value
    assert record["shape"]["kind"] == kind
    assert record["runner_up"] == plan.runner_up[0].value
    assert record["hardware"] == "h100_sxm"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "rwkv"}, "cp.plan_mixer: kind is 'rwkv'; needed one of "
         "gated_delta_rule, kda, mamba2, mamba, linear_attention"),
        ({"strategy": "ring"}, "cp.plan_mixer: strategy is 'ring'; needed one of auto, "
         "exchange, states, gather"),
        ({"work": "much"}, "cp.plan_mixer: work is 'much'; needed one of operands, "
         "chunks"),
        ({"dtype": "int8"}, "cp.plan_mixer: dtype is 'int8'; needed one of float64, "
         "float32, bfloat16, float16"),
        ({"direction": "up"}, "cp.plan_mixer: direction is 'up'; needed one of "
         "forward, backward, both"),
        ({"seq": 0}, "cp.plan_mixer: seq is 0; needed a positive integer"),
        ({"ranks": True}, "cp.plan_mixer: ranks is True; needed a positive integer"),
        ({"key_heads": 5}, "cp.plan_mixer: value_heads is 32; needed a multiple of "
         "key_heads, which is 5"),
        ({"kind": "mamba", "key_heads": 2}, "cp.plan_mixer: key_heads is 2 for mamba; "
         "needed 1, as all channels read the same B and C"),
    ],
)  # fmt: skip
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError) as caught:
        planned(**changes)
    assert str(caught.value) == message


def test_a_direction_is_an_enum():
    assert planned(direction="forward").direction is Direction.FORWARD
