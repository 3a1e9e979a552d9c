"""What explain lists is what torch.profiler counts, in messages and in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cpcompile as cp
from cpcompile.accounting.graph_account import Exchange, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.models.setting import Setting
from tests.models.steps import make_model, run_steps
from tests.models.zoo import CASES
from tests.support.forms import convolved_forms
from tests.support.one_attention import Model, mean_loss, sliced
from tests.support.profiled_messages import Messages, differences

VOCABULARY = 64


def rolled(logits: Tensor, tokens: Tensor) -> Tensor:
    return (torch.roll(logits, 1, 1) * logits).sum()


def last_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits[:, -1].logsumexp(-1).sum()


def in_chunks(logits: Tensor, tokens: Tensor) -> Tensor:
    """A loop, of which each part is gathered by itself."""
    parts = logits.flatten(0, 1).split(6)
    return torch.stack([part.logsumexp(-1).sum() for part in parts]).sum()


LOSSES = {f.__name__: f for f in (mean_loss, sliced, rolled, last_token, in_chunks)}


def counted(step: Callable[[], Any], ranks: int) -> tuple[Exchange, ...]:
    """What explain lists of a step, which is what the profiler counts.

    Of the last of three steps; the second compiles too, if the first sets a flag.
    """
    step()
    step()
    with recording() as reports, Messages(ranks, torch.distributed.get_rank()) as found:
        step()
    accounts = [account for report in reports for account in report.accounts]
    wrong = differences(accounts, found)
    assert not wrong, "\n".join(wrong)
    rows = tuple(x for account in accounts for x in account.exchanges)
    assert rows, "nothing was exchanged"
    return rows


def run(
    name: str, length: int, ranks: int, options: dict[str, Any]
) -> tuple[Exchange, ...]:
    """A training step of a loss."""
    model = Model(LOSSES[name])
    tokens = torch.randint(VOCABULARY, (2, length))
    compiled = compiled_on(ranks, model, **options)
    return counted(lambda: compiled(tokens).backward(), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
@on_ranks("ranks")
def test_losses(name: str, ranks: int) -> None:
    """Uneven shards too: what is padded travels, and is counted."""
    run(name, 16, ranks, {})


STRATEGIES = {
    "ring": {"strategy": "ring", "layout": "contiguous"},
    "zigzag": {"strategy": "ring", "layout": "zigzag"},
    "all_gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "hybrid": {"strategy": "hybrid"},
}


@pytest.mark.parametrize("length", [32, 29])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_strategies(name: str, length: int) -> None:
    found = run("mean_loss", length, 4, STRATEGIES[name])
    attention = [x for x in found if x.purpose is Purpose.ATTENTION]
    assert attention and all(x.line.function == "forward" for x in attention)
    gradients = {x.what for x in found if x.purpose is Purpose.GRADIENT}
    parts = ("embedding.weight", "qkv.weight", "qkv.bias")
    assert gradients == {*parts, "head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["sliced", "mean_loss"])
@on_ranks(2)
def test_with_inductor(name: str) -> None:
    """Rings are unrolled, and gradients travel in buckets."""
    run(name, 30, 2, {"inner": "inductor"})


@on_ranks(3)
def test_tokens_of_neighbours() -> None:
    """Of a model with convolutions over its tokens."""
    compiled = compiled_on(3, convolved_forms.Model("conformer"))
    tokens = torch.randint(23, (2, 20))
    found = counted(lambda: compiled(tokens).square().mean().backward(), 3)
    assert Purpose.NEIGHBOURS in {x.purpose for x in found}


@pytest.mark.timeout(310)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=300)
def test_models(name: str) -> None:
    """A training step of a model of the table of compatibility."""
    case, setting = CASES[name], Setting(world=2)
    model = make_model(case)
    options = setting.options() | {"mesh": sequence_mesh(2), "shard": case.shard}
    compiled = torch.compile(model, backend="cp", options=options)
    with cp.config.patch(hardware="cpu"):
        counted(lambda: run_steps(case, setting, model, compiled), 2)


@on_ranks(2)
def test_explain_names_the_lines() -> None:
    """The largest first, by its line, and gradients of parameters by their names."""
    model, tokens = Model(sliced), torch.randint(VOCABULARY, (2, 16))
    explanation = cp.explain(compiled_on(2, model, strategy="ring"), tokens)
    sizes = [x.bytes for x in explanation.exchanges]
    assert sizes == sorted(sizes, reverse=True)
    logits = next(x for x in explanation.exchanges if x.line.function == "sliced")
    assert (logits.kind, logits.purpose) == (Kind.ALL_GATHER, Purpose.VALUE)
    assert logits.bytes == 8 * 2 * VOCABULARY * 4  # half of the logits
    text = str(explanation)
    row = next(x for x in text.splitlines() if x.endswith("in sliced"))
    assert row.split()[:4] == ["forward", "all-gather", "value", "0.004"]
    assert "gradients" in text and "embedding.weight" in text
