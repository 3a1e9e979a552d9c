"""What one rank cannot compile no rank runs: all raise its text, or all fall back."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cpcompile as cp
from cpcompile import logs
from cpcompile.compile import attempts, warm_start
from cpcompile.cost.plans import Strategy
from cpcompile.frontend import request
from cpcompile.passes.model.attention import choose_strategy
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import Model, compiled, message_of, tokens
from tests.support import bounds
from tests.support.bounds import Deviation, in_one_process


def fails_on_the_last(
    place: str, error: type[BaseException] = MemoryError, once: bool = False
):
    """What the backend calls at `place`, which fails on the last rank."""
    module, name = {
        "before": (request, "describe"),
        "in the passes": (attempts, "run_passes"),
        "after them": (warm_start, "compile_inner"),
    }[place]
    original = getattr(module, name)
    fails = dist.get_rank() == dist.get_world_size() - 1

    def call(*args, **kwargs):
        nonlocal fails
        if fails:
            fails = not once
            raise error("2 GiB wanted")
        return original(*args, **kwargs)

    return mock.patch.object(module, name, call)


def step_of(model, **given):
    """The model compiled for all ranks."""
    torch._dynamo.reset()
    return compiled_on(dist.get_world_size(), model, **given)


def strict(place: str, dynamic: bool | None) -> tuple[str, list[Deviation]]:
    """What a call raises on this rank, and deviations of the next one."""
    model = Model()
    step = step_of(model, dynamic=dynamic)
    with fails_on_the_last(place):
        text = message_of(lambda: step(tokens()))
    return text, deviations_of(step, model)


def deviations_of(step, model: Model) -> list[Deviation]:
    """Of loss and gradient."""
    values = in_one_process(lambda alone: bounds.step(alone, alone, tokens()), model)
    return bounds.deviations(bounds.step(step, model, tokens()), *values)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("place", "dynamic"),
    [
        ("before", None),
        ("in the passes", None),
        ("after them", None),
        ("in the passes", True),  # where the others trace again, and forget that
    ],
)
def test_strict_raises_on_all_ranks(pools, place, dynamic):
    first, second = pools[2].run(strict, place, dynamic, timeout=150)
    assert "MemoryError: 2 GiB wanted" in second[0]
    assert "RankFailedError: rank 0 of group" in first[0]
    assert "rank 1 cannot: MemoryError: 2 GiB wanted" in first[0]
    bounds.check(first[1] + second[1])


@pytest.mark.parametrize("place", ["in the passes", "after them"])
@on_ranks(2)
def test_all_ranks_fall_back(place):
    logs.warn_once.cache_clear()
    model = Model()
    step = compiled(model, strict=False)
    with fails_on_the_last(place, once=True), warnings() as texts:
        report = cp.explain(step, tokens())
        bounds.check(deviations_of(step, model))
    assert [call.plan for call in report.calls] == [None]
    warned = " ".join(texts)
    assert "forward runs unsharded, with all of its work on every rank: " in warned
    assert "2 GiB wanted" in warned


def interrupted() -> str:
    step = compiled(Model())
    with fails_on_the_last("in the passes", KeyboardInterrupt):
        try:
            step(tokens())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
    step(tokens()).backward()
    return text


def test_an_interrupt_of_one_rank(pools):
    first, second = pools[2].run(interrupted)
    assert second == "KeyboardInterrupt: 2 GiB wanted"
    assert "rank 1 cannot: KeyboardInterrupt" in first


def wrong_on_one_rank(what: str) -> str:
    """A mistake that only the last rank makes, before the ranks compare anything."""
    last = dist.get_rank() == 1
    options = {
        "a name": {"shard": {"tokns": 1}},
        "an option": {"strategy": "rings"},
    }[what]
    step = compiled(Model(), **(options if last else {}))
    text = message_of(lambda: step(tokens()))
    compiled(Model())(tokens()).backward()
    return text


@pytest.mark.parametrize(
    ("what", "mine"),
    [
        ("a name", "InputError: options['shard'] names 'tokns'"),
        ("an option", "OptionError: option 'strategy' of backend=\"cp\": got"),
    ],
)
def test_a_mistake_of_one_rank_is_named_on_the_others(pools, what, mine):
    first, second = pools[2].run(wrong_on_one_rank, what)
    assert mine in second and "RankFailedError" not in second
    assert f"rank 1 cannot: {mine}" in first


def other_strategy(others: str) -> str:
    """Something that is not compared makes the last rank choose another strategy."""
    choose = choose_strategy.choose
    last = dist.get_rank() == dist.get_world_size() - 1
    strategy = Strategy(others) if last else Strategy.RING

    def chosen(*args, **kwargs):
        return choose(*args, **(kwargs | {"strategy": strategy}))

    step = step_of(Model())
    with mock.patch.object(choose_strategy, "choose", chosen):
        return message_of(lambda: step(tokens()))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "others"), [(2, "ulysses"), (4, "hybrid")])
def test_plans_that_differ(pools, world, others):
    """Of a hybrid before its groups are made, which only all ranks together can do."""
    texts = pools[world].run(other_strategy, others, timeout=150)
    assert len(set(texts)) == 1
    assert "RankMismatchError: the ranks of group" in texts[0]
    assert "plan of call 0 at" in texts[0] and "rank 0 has ring" in texts[0]
    assert f"rank {world - 1} has {others}" in texts[0]
