"""Mixtures of experts on ranks that sort their own tokens, against one process."""

import pytest
import torch

from tests.cpu.against_one_process import compare, compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import WIDTH
from tests.cpu.routed_models import ROUTED, EveryExpert
from tests.support.settings import split

# What has to see all tokens runs on gathered ones, with a warning.
GATHERED = {"TokensMeet", "Capacity"}
SIZES = [(16, 2, 2), (17, 2, 3), (9, 1, 2), (3, 3, 4)]
ZIGZAG = {"strategy": "ring", "layout": "zigzag"}
CASES = [
    *((name, *sizes, "plain", {}) for name in ROUTED for sizes in SIZES),
    *((name, 16, 2, 2, "dtensor", {}) for name in ROUTED),
    *(
        (name, 16, 2, 2, "plain", ZIGZAG)
        for name in ("Routed", "IndexAdd", "Checkpointed", "Capacity")
    ),
]


@pytest.mark.parametrize(("name", "seq", "batch", "world", "door", "options"), CASES)
@on_ranks("world")
def test_tokens_are_routed_as_in_one_process(name, seq, batch, world, door, options):
    model, tokens = ROUTED[name]().double(), torch.randint(0, 50, (batch, seq))
    named = {"shard": {"tokens": 1}} if door == "plain" else {}
    options, settings = split({"fullgraph": True} | named | options)
    with settings:
        found = compare_calls(model, [(tokens,)], world, door, **options)
    found.check()
    assert len(found.rewritten) == 1
    assert name in GATHERED or not found.warnings


@pytest.mark.parametrize(
    ("batch", "tokens", "world", "door"),
    [
        (1, 16, 2, "plain"),
        (1, 17, 3, "plain"),
        (2, 17, 2, "plain"),
        (1, 16, 2, "dtensor"),  # Dynamo itself traces the views of several rows
        (1, 17, 3, "dtensor"),
    ],
)
@on_ranks("world")
def test_every_expert_gets_the_tokens_of_a_rank(batch, tokens, world, door):
    comparison = compare(EveryExpert, (batch, tokens, WIDTH), world, door)
    comparison.check()
    assert [
        x for x in comparison.warnings if "gathered tensors" in x or "times the" in x
    ] == []
