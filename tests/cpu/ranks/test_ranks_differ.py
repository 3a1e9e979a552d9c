"""An input, mode or setting of one rank is named on every rank, with the fix."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from cpcompile import config
from tests.cpu.attention_cases import compiled_on
from tests.cpu.one_call import Model, message_of, tokens

ON_ONE_RANK = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "tie_fraction": lambda: config.patch(tie_fraction=50.0),
}


def differ(what: str) -> str:
    torch._dynamo.reset()
    model = Model()
    context = contextlib.nullcontext()
    if dist.get_rank() == 1:
        context = ON_ONE_RANK.get(what, contextlib.nullcontext)()
        if what == "frozen":
            model.embedding.weight.requires_grad_(False)
        if what == "eval":
            model.eval()
    other = what if dist.get_rank() == 1 else ""
    strategy = "all_gather" if other == "options" else "ring"
    step = compiled_on(2, model, strategy=strategy)
    given = tokens(20 if other == "shapes" else 16) + (other == "values")
    with context:
        return message_of(lambda: step(given))


@pytest.mark.parametrize(
    ("what", "item", "fix"),
    [
        (
            "shapes",
            "rank 0 has torch.int64 [2, 16], rank 1 has torch.int64 [2, 20]",
            "needed the same inputs, shapes, options and settings on every rank",
        ),
        ("values", "values of tokens: rank 0 has", "give every rank the same tokens"),
        ("options", "strategy=Strategy.RING", "strategy=Strategy.ALL_GATHER"),
        (
            "autocast",
            "autocast of cpu: rank 0 has off, rank 1 has torch.bfloat16",
            "enter torch.autocast on every rank or on none",
        ),
        (
            "inference_mode",
            "grad mode: rank 0 has on, rank 1 has off",
            "inference_mode() on every rank or on none",
        ),
        (
            "tie_fraction",
            "cpcompile.config.tie_fraction: rank 0 has 0.05, rank 1 has 50.0",
            "set it alike on every rank",
        ),
        (
            "frozen",
            "rank 0 has torch.float32 [60, 32], requires_grad, rank 1 has "
            "torch.float32 [60, 32]",
            "give every rank the whole tensor, with the same dtype and requires_grad",
        ),
        (
            "eval",
            "training mode of self: rank 0 has train, rank 1 has eval",
            "call train() or eval() on every rank",
        ),
    ],
)
def test_a_difference(pools, what, item, fix):
    first, second = pools[2].run(differ, what)
    assert first == second
    assert "RankMismatchError: the ranks of group" in first
    assert item in first and fix in first
