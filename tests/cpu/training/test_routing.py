"""Mixtures of experts on ranks that sort their own tokens, against one process."""

import pytest
import torch

import cpcompile as cp
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import WIDTH
from tests.cpu.routed_models import ROUTED, EveryExpert
from tests.models.run_case import warnings_of
from tests.support.bounds import check, deviations, in_one_process, step


def run_routed(name, seq, batch, door, strategy="auto", layout="auto"):
    """Deviations of loss and gradients, warnings, and how many calls are sharded."""
    torch._dynamo.reset()
    warn_once.cache_clear()
    torch.manual_seed(0)
    model = ROUTED[name]()
    tokens = torch.randint(0, 50, (batch, seq))
    values = in_one_process(lambda alone: step(alone, alone, tokens), model)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "strategy": strategy, "layout": layout}
    given = cp.shard(tokens, mesh, 1)
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
        given = tokens
    compiled = torch.compile(model, backend="cp", options=options, fullgraph=True)
    with warnings_of() as warnings, recording() as reports:
        got = step(compiled, model, given)
    found = deviations(got, *values)
    return found, list(warnings), sum(len(r.calls) for r in reports)


# What has to see all tokens runs on gathered ones, with a warning.
GATHERED = {"TokensMeet", "Capacity"}
SIZES = [(16, 2, 2), (17, 2, 3), (9, 1, 2), (3, 3, 4)]


def check_runs(answers, name):
    for found, warnings, calls in answers:
        check(found)
        assert calls == 1
        if name not in GATHERED:
            assert not warnings


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("seq", "batch", "world"), SIZES)
@pytest.mark.parametrize("name", ROUTED)
def test_tokens_are_routed_as_in_one_process(pools, name, seq, batch, world):
    arguments = (name, seq, batch, "plain")
    check_runs(pools[world].run(run_routed, *arguments, timeout=90), name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ROUTED)
def test_distributed_inputs(pools, name):
    check_runs(pools[2].run(run_routed, name, 16, 2, "dtensor", timeout=90), name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["Routed", "IndexAdd", "Checkpointed", "Capacity"])
def test_tokens_in_a_balanced_layout(pools, name):
    arguments = (name, 16, 2, "plain", "ring", "zigzag")
    check_runs(pools[2].run(run_routed, *arguments, timeout=90), name)


def run_every_expert(batch, tokens, world, door):
    comparison = compare(EveryExpert, (batch, tokens, WIDTH), world, door)
    comparison.check()
    return comparison.warnings


@pytest.mark.parametrize(
    ("batch", "tokens", "world", "door"),
    [
        (1, 16, 2, "plain"),
        (1, 17, 3, "plain"),
        (2, 16, 2, "plain"),
        (2, 17, 2, "plain"),
        (3, 8, 3, "plain"),
        (1, 16, 2, "dtensor"),  # Dynamo itself traces the views of several rows
        (1, 17, 3, "dtensor"),
    ],
)
def test_every_expert_gets_the_tokens_of_a_rank(pools, batch, tokens, world, door):
    for texts in pools[world].run(run_every_expert, batch, tokens, world, door):
        assert [x for x in texts if "gathered tensors" in x or "times the" in x] == []
