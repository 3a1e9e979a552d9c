"""What explain lists is what torch.profiler counts, in messages and in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cpcompile as cp
from cpcompile.accounting.graph_account import Exchange, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on, sequence_mesh
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


@dataclass(frozen=True)
class Counted:
    """Of one rank: what explain lists, and where the profiler counts something else."""

    exchanges: tuple[Exchange, ...]
    differences: list[str]

    def check(self) -> None:
        assert not self.differences, "\n".join(self.differences)
        assert self.exchanges, "nothing was exchanged"


def counted(step: Callable[[], Any], ranks: int) -> Counted:
    """Of the last of three steps; the second compiles too, if the first sets a flag."""
    step()
    step()
    with recording() as reports, Messages(ranks, torch.distributed.get_rank()) as found:
        step()
    accounts = [account for report in reports for account in report.accounts]
    rows = tuple(x for account in accounts for x in account.exchanges)
    return Counted(rows, differences(accounts, found))


def run(name: str, length: int, ranks: int, options: dict[str, Any]) -> Counted:
    """A training step of a loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(LOSSES[name])
    tokens = torch.randint(VOCABULARY, (2, length))
    compiled = compiled_on(ranks, model, **options)
    return counted(lambda: compiled(tokens).backward(), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(pools, name: str, ranks: int) -> None:
    """Uneven shards too: what is padded travels, and is counted."""
    for found in pools[ranks].run(run, name, 16, ranks, {}, timeout=120):
        found.check()


STRATEGIES = {
    "ring": {"strategy": "ring", "layout": "contiguous"},
    "zigzag": {"strategy": "ring", "layout": "zigzag"},
    "all_gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "hybrid": {"strategy": "hybrid"},
}


@pytest.mark.parametrize("length", [32, 29])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(pools, name: str, length: int) -> None:
    options = STRATEGIES[name]
    for found in pools[4].run(run, "mean_loss", length, 4, options, timeout=120):
        found.check()
        attention = [x for x in found.exchanges if x.purpose is Purpose.ATTENTION]
        assert attention and all(x.line.function == "forward" for x in attention)
        gradients = {x.what for x in found.exchanges if x.purpose is Purpose.GRADIENT}
        parts = ("embedding.weight", "qkv.weight", "qkv.bias")
        assert gradients == {*parts, "head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["sliced", "mean_loss"])
def test_with_inductor(pools, name: str) -> None:
    """Rings are unrolled, and gradients travel in buckets."""
    options = {"inner": "inductor"}
    for found in pools[2].run(run, name, 30, 2, options, timeout=240):
        found.check()


def run_convolved(name: str, ranks: int) -> Counted:
    """A training step of a model with convolutions over its tokens."""
    torch._dynamo.reset()
    model = convolved_forms.Model(name)
    tokens = torch.randint(23, (2, 20))
    compiled = compiled_on(ranks, model)
    return counted(lambda: compiled(tokens).square().mean().backward(), ranks)


def test_tokens_of_neighbours(pools) -> None:
    for found in pools[3].run(run_convolved, "conformer", 3, timeout=120):
        found.check()
        assert Purpose.NEIGHBOURS in {x.purpose for x in found.exchanges}


def run_model(name: str, ranks: int) -> Counted:
    """A training step of a model of the table of compatibility."""
    torch._dynamo.reset()
    case, setting = CASES[name], Setting(world=ranks)
    model = make_model(case)
    options = setting.options() | {"mesh": sequence_mesh(ranks), "shard": case.shard}
    compiled = torch.compile(model, backend="cp", options=options)
    with cp.config.patch(hardware="cpu"):
        return counted(lambda: run_steps(case, setting, model, compiled), ranks)


@pytest.mark.parametrize("name", CASES)
def test_models(pools, name: str) -> None:
    for found in pools[2].run(run_model, name, 2, timeout=300):
        found.check()


def run_explained(length: int) -> tuple[str, dict[str, Any]]:
    """The text and the data of an explanation."""
    torch._dynamo.reset()
    model, tokens = Model(sliced), torch.randint(VOCABULARY, (2, length))
    compiled = compiled_on(2, model, strategy="ring")
    explanation = cp.explain(compiled, tokens)
    return str(explanation), explanation.exchanges


def test_explain_names_the_lines(pools) -> None:
    """The largest first, by its line, and gradients of parameters by their names."""
    for text, exchanges in pools[2].run(run_explained, 16, timeout=120):
        sizes = [x.bytes for x in exchanges]
        assert sizes == sorted(sizes, reverse=True)
        logits = next(x for x in exchanges if x.line.function == "sliced")
        assert (logits.kind, logits.purpose) == (Kind.ALL_GATHER, Purpose.VALUE)
        assert logits.bytes == 8 * 2 * VOCABULARY * 4  # half of the logits
        row = next(x for x in text.splitlines() if x.endswith("in sliced"))
        assert row.split()[:4] == ["forward", "all-gather", "value", "0.004"]
        assert "gradients" in text and "embedding.weight" in text
