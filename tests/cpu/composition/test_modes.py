"""Modes of torch around a compiled program: compiled autograd, dispatch modes."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.distributed.tensor.debug import CommDebugMode

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.composition.training import batches, loss_of, new_gpt
from tests.support.bounds import Deviation, check, deviations, gradients

TOKENS = 17


def exact() -> dict[str, Tensor]:
    model = new_gpt()
    tokens, labels = next(batches(TOKENS))
    loss = loss_of(model(tokens), labels)
    return {"loss": loss.detach()} | gradients(loss, model)


def run_whole_step() -> list[Deviation]:
    """Forward and backward are in what is compiled, the latter by compiled autograd."""
    torch._dynamo.reset()
    model = new_gpt()
    mesh = sequence_mesh(2)

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model(tokens), labels)
        loss.backward()
        return loss.detach()

    options = {"mesh": mesh, "inner": "aot_eager"}
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(train_step, backend="cp", options=options)
        loss = compiled(*next(batches(TOKENS)))
    named = model.named_parameters()
    got = {"loss": loss} | {f"grad of {n}": p.grad for n, p in named}
    return deviations(got, exact())


def run_backward(compiled_too: bool) -> list[Deviation]:
    """Only the backward runs under compiled autograd, compiled by another backend."""
    torch._dynamo.reset()
    model = new_gpt()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    tokens, labels = next(batches(TOKENS))
    enabled = compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with enabled if compiled_too else nullcontext():
        loss = loss_of(compiled(tokens), labels)
    with nullcontext() if compiled_too else enabled:
        got = {"loss": loss.detach()} | gradients(loss, model)
    return deviations(got, exact())


def test_a_whole_step_under_compiled_autograd(pools) -> None:
    for found in pools[2].run(run_whole_step, timeout=90):
        check(found)


@pytest.mark.parametrize("compiled_too", [True, False])
def test_compiled_autograd_around_a_part(pools, compiled_too: bool) -> None:
    for found in pools[2].run(run_backward, compiled_too, timeout=90):
        check(found)


def run_under_a_dispatch_mode() -> tuple[str, list[Deviation], int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = new_gpt()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    tokens, labels = next(batches(TOKENS))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("cpcompile").addHandler(handler)
    with CommDebugMode():
        compiled(tokens)
    logging.getLogger("cpcompile").removeHandler(handler)
    loss = loss_of(compiled(tokens), labels)
    got = {"loss": loss.detach()} | gradients(loss, model)
    calls = torch._dynamo.utils.counters["cpcompile"]["insert_attention"]
    return "\n".join(said), deviations(got, exact()), calls


def test_a_first_call_under_a_dispatch_mode_is_warned_of(pools) -> None:
    """Dynamo skips it; the next call is compiled."""
    for said, found, calls in pools[2].run(run_under_a_dispatch_mode, timeout=90):
        assert "compiles nothing under CommDebugMode" in said
        assert "runs unsharded, with all of its work on every rank" in said
        check(found)
        assert calls == len(new_gpt().layers)
