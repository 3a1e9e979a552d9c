"""What slices, shifts, picks and joined sequences send: few tokens, and no gathers.

Against one process in float64. A profiler counts the bytes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from cpcompile import config, logs
from cpcompile.accounting.graph_account import Kind
from cpcompile.passes.joint.tiling import sink_slices
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support import bounds
from tests.support.bounds import default_dtype
from tests.support.moved_programs import (
    CHANNELS,
    EXCHANGED,
    HEADS_OF,
    WORDS,
    ids_of,
    make,
)
from tests.support.profiled_messages import Messages, differences

# Where each sequence has its own positions, all tokens are gathered for the writes.
BY_ROW = ("tokens written by row", "deeper tokens")
FEW = 24  # tokens that a rank receives in all exchanges together


def step(call: Any, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    grads = bounds.step(call, model, ids)
    unused = {f"grad of {n}": torch.zeros(()) for n, _ in model.named_parameters()}
    return unused | {name: x.clone() for name, x in grads.items()}


def run(
    name: str, world: int, batch: int, tokens: int, checkpoints: bool, options: Any
) -> dict[str, Any]:
    logs.warn_once.cache_clear()
    with default_dtype(torch.float64):
        model, ids = make(name)(), ids_of(batch, tokens)
        if checkpoints:
            attend = model.attend
            model.attend = lambda *args, **given: checkpoint(
                attend, *args, use_reentrant=False, **given
            )
        wanted = step(model, model, ids)
        compiled = compiled_on(world, model, **{"strategy": "ring"} | options)
        with warnings() as texts, recording() as reports:
            got = step(compiled, model, ids)
        with Messages(world, dist.get_rank()) as messages:
            step(compiled, model, ids)
    accounts = [account for report in reports for account in report.accounts]
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    return {
        "warnings": texts,
        "gathers": messages.counts[Kind.ALL_GATHER],
        "gathered": messages.sizes[Kind.ALL_GATHER],
        "exchanged": messages.sizes[Kind.ALL_TO_ALL],
        "unlisted": differences(accounts, messages),
    }


LAYOUTS = ("contiguous", "zigzag")
CASES = [
    *(
        (name, world, batch, tokens, how)
        for name in HEADS_OF
        for world, batch, tokens in ((2, 2, 96), (3, 1, 95), (4, 2, 98))
        for how in LAYOUTS
    ),
    *(("draft", 2, 1, 2048, layout) for layout in LAYOUTS),
    *((name, 2, 1, 95, "exchanged") for name in EXCHANGED),
    *((name, 2, 2, 95, "checkpoints") for name in HEADS_OF),
    *((name, 2, 1, 95, "inductor") for name in HEADS_OF),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "world", "batch", "tokens", "how"), CASES)
@on_ranks("world", timeout=200)
def test_few_tokens_travel(name, world, batch, tokens, how):
    """What attends backwards, or to every second token, brings them elsewhere.

    Of few tokens the steps of a draft are exchanged for channels, in fewer messages.
    """
    options = {"layout": how} if how in LAYOUTS else {}
    options |= {"inner": "inductor"} if how == "inductor" else {}
    found = run(name, world, batch, tokens, how == "checkpoints", options)
    elsewhere = name in ("backwards", "every second", "parts", "rows added")
    elsewhere |= name == "draft" and tokens < 2048
    few = FEW * batch * WORDS * 8
    if how == "inductor":
        assert found["gathered"] <= few or name in BY_ROW
    elif how in LAYOUTS:
        assert found["unlisted"] == []
        if name not in BY_ROW:
            assert found["gathered"] <= few
        if not elsewhere:
            assert found["warnings"] == [] and found["exchanged"] <= few


@pytest.mark.parametrize("name", ["flat loss", "policy loss", "entropy"])
@on_ranks(2)
def test_losses_of_cut_logits_run_in_tiles(name):
    """Whatever the gradient is that comes in: of a mean, or of each token."""
    small = mock.patch.object(sink_slices, "LEAST_BYTES", 1000)
    with small, config.patch(tile_least_megabytes=1e-3), recording() as reports:
        run(name, 2, 1, 96, False, {"tile": 8})
    found = [tile for report in reports for tile in report.tiles]
    assert ("logits", 8, True) in [(x.path, x.tile, x.gradients_at_once) for x in found]


SYMBOLIC = [
    "flat loss",
    "policy loss",
    "next tokens",
    "last logits",
    "last valid token",
    "middle token",
]


@pytest.mark.parametrize("name", SYMBOLIC)
@on_ranks(2)
def test_one_program_serves_many_lengths(name):
    counters.clear()
    with default_dtype(torch.float64):
        model = make(name)()
        compiled = compiled_on(2, model)
        for tokens in (48, 64, 96, 200, 132):
            ids = ids_of(2, tokens)
            got = step(compiled, model, ids)
            assert_close(got, step(model, model, ids), rtol=1e-9, atol=1e-10)
    graphs = counters["stats"]["unique_graphs"]
    if name == "middle token":
        assert graphs == 5  # which token that is, is not proved for all lengths
    else:
        assert graphs == 2  # of the first length, and of all others


@on_ranks(2)
def test_a_position_that_is_not_there_raises_as_in_torch():
    """Errors of positions that a sequence has not, in one process and on ranks."""
    errors = []
    for call in (lambda x: x, lambda x: compiled_on(2, x)):
        model = make("chosen tokens")()
        model.head = lambda m, x, ids: x[torch.arange(2), ids[:, 0] + 90]
        try:
            call(model)(torch.full((2, 96), 10))
        except IndexError as error:
            errors.append(str(error))
    assert len(errors) == 2 and all("100" in text for text in errors)


assert CHANNELS < WORDS  # a token of logits is the largest one that travels
