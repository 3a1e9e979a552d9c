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
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.one_call import Model, compiled, message_of, tokens
from tests.support import bounds
from tests.support.bounds import Deviation, in_one_process


def fails_on_the_last(place: str, error: type[BaseException] = MemoryError):
    """What the backend calls at `place`, which fails on the last rank."""
    module, name = {
        "before": (request, "describe"),
        "in the passes": (attempts, "run_passes"),
        "after them": (warm_start, "compile_inner"),
    }[place]
    original = getattr(module, name)
    fails = dist.get_rank() == dist.get_world_size() - 1

    def call(*args, **kwargs):
        if fails:
            raise error("2 GiB wanted")
        return original(*args, **kwargs)

    return mock.patch.object(module, name, call)


def step_of(model, **given):
    """The model compiled for all ranks."""
    torch._dynamo.reset()
    options = {"mesh": sequence_mesh(dist.get_world_size()), "inner": "aot_eager"}
    return torch.compile(model, backend="cp", options=options, **given)


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


def lenient(place: str) -> tuple[list[Deviation], list[bool], str]:
    """Deviations, calls that were sharded, and what was warned."""
    logs.warn_once.cache_clear()
    torch.manual_seed(0)
    model = Model()
    step = compiled(model, strict=False)
    with fails_once(place) as warned:
        report = cp.explain(step, tokens())
        found = deviations_of(step, model)
    sharded = [call.plan is not None for call in report.calls]
    return found, sharded, " ".join(warned)


class fails_once:
    """As above, for the first call of the place only; collects the warnings."""

    def __init__(self, place: str) -> None:
        module, name = {
            "in the passes": (attempts, "run_passes"),
            "after them": (warm_start, "compile_inner"),
        }[place]
        self.original, self.texts, self.calls = getattr(module, name), [], 0
        self.patches = [
            mock.patch.object(module, name, self.call),
            mock.patch.object(logs, "warn_once", self.texts.append),
        ]

    def call(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 1 and dist.get_rank() == 1:
            raise MemoryError("2 GiB wanted")
        return self.original(*args, **kwargs)

    def __enter__(self) -> list[str]:
        for patch in self.patches:
            patch.start()
        return self.texts

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


@pytest.mark.parametrize("place", ["in the passes", "after them"])
def test_all_ranks_fall_back(pools, place):
    for found, sharded, warned in pools[2].run(lenient, place):
        bounds.check(found)
        assert sharded == [False]
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
        "a dimension": {"shard": {"tokens": 7}},
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
