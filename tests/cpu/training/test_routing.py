"""Mixtures of experts on ranks that sort their own tokens, against one process."""

import pytest
import torch

import cpcompile as cp
from cpcompile.logs import warn_once
from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import gradients, relative_error
from tests.cpu.routed_models import ROUTED
from tests.models.run_case import warnings_of


def run_routed(name, seq, batch, door, strategy="auto", layout="auto"):
    """Errors of loss and gradients, what was warned of, and the sharded calls."""
    torch._dynamo.reset()
    warn_once.cache_clear()
    torch.manual_seed(0)
    model = ROUTED[name]()
    tokens = torch.randint(0, 50, (batch, seq))
    expected = model(tokens)
    wanted = gradients(expected, model)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "strategy": strategy, "layout": layout}
    given = cp.shard(tokens, mesh, 1)
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
        given = tokens
    step = torch.compile(model, backend="cp", options=options, fullgraph=True)
    with warnings_of() as warnings, recording() as reports:
        loss = step(given)
        got = gradients(loss, model)
    pairs = [(loss, expected), *zip(got, wanted, strict=True)]
    errors = [relative_error(x, y) for x, y in pairs]
    return max(errors), list(warnings), sum(len(r.calls) for r in reports)


# What has to see all tokens runs on gathered ones, with a warning.
GATHERED = {"TokensMeet", "Capacity"}
# Sums of bfloat16 numbers, of other parts.
LIMIT = {"GroupedProduct": 2**-7}
SIZES = [(16, 2, 2), (17, 2, 3), (9, 1, 2), (3, 3, 4)]


def check(answers, name):
    for error, warnings, calls in answers:
        assert error < LIMIT.get(name, 1e-5)
        assert calls == 1
        if name not in GATHERED:
            assert not warnings


@pytest.mark.core("IndexAdd-9-1-2", "Back-9-1-2", "Batched-9-1-2", "UsedExperts-9-1-2")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("seq", "batch", "world"), SIZES)
@pytest.mark.parametrize("name", ROUTED)
def test_tokens_are_routed_as_in_one_process(pools, name, seq, batch, world):
    arguments = (name, seq, batch, "plain")
    check(pools[world].run(run_routed, *arguments, timeout=90), name)


@pytest.mark.core("Unflattened")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ROUTED)
def test_distributed_inputs(pools, name):
    check(pools[2].run(run_routed, name, 16, 2, "dtensor", timeout=90), name)


@pytest.mark.core("Routed")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["Routed", "IndexAdd", "Checkpointed", "Capacity"])
def test_tokens_in_a_balanced_layout(pools, name):
    arguments = (name, 16, 2, "plain", "ring", "zigzag")
    check(pools[2].run(run_routed, *arguments, timeout=90), name)
