"""Modes of torch around a compiled program: compiled autograd, dispatch modes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.distributed.tensor.debug import CommDebugMode

from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.composition.training import batches, loss_of, new_gpt
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, gradients

TOKENS = 17


def exact() -> dict[str, Tensor]:
    model = new_gpt()
    tokens, labels = next(batches(TOKENS))
    loss = loss_of(model(tokens), labels)
    return {"loss": loss.detach()} | gradients(loss, model)


@on_ranks(2)
def test_a_whole_step_under_compiled_autograd() -> None:
    """Forward and backward are in what is compiled, the latter by compiled autograd."""
    model = new_gpt()

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model(tokens), labels)
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(compiled_autograd=True):
        loss = compiled_on(2, train_step)(*next(batches(TOKENS)))
    named = model.named_parameters()
    got = {"loss": loss} | {f"grad of {n}": p.grad for n, p in named}
    check(deviations(got, exact()))


@pytest.mark.parametrize("compiled_too", [True, False])
@on_ranks(2)
def test_compiled_autograd_around_a_part(compiled_too: bool) -> None:
    """Only the backward runs under compiled autograd, compiled by another backend."""
    model = new_gpt()
    compiled = compiled_on(2, model)
    tokens, labels = next(batches(TOKENS))
    enabled = compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with enabled if compiled_too else nullcontext():
        loss = loss_of(compiled(tokens), labels)
    with nullcontext() if compiled_too else enabled:
        got = {"loss": loss.detach()} | gradients(loss, model)
    check(deviations(got, exact()))


@on_ranks(2)
def test_a_first_call_under_a_dispatch_mode_is_warned_of() -> None:
    """Dynamo skips it; the next call is compiled."""
    torch._dynamo.utils.counters.clear()
    model = new_gpt()
    compiled = compiled_on(2, model)
    tokens, labels = next(batches(TOKENS))
    with warnings() as texts, CommDebugMode():
        compiled(tokens)
    loss = loss_of(compiled(tokens), labels)
    got = {"loss": loss.detach()} | gradients(loss, model)
    calls = torch._dynamo.utils.counters["cpcompile"]["insert_attention"]
    check(deviations(got, exact()))
    said = "\n".join(texts)
    assert "torch.compile compiles nothing under CommDebugMode" in said
    assert "runs unsharded, with all of its work on every rank" in said
    assert calls == len(new_gpt().layers)
