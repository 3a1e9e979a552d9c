"""What cannot be right is refused, on every rank with the same text; nothing hangs."""

import datetime
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import cpcompile as cp
from cpcompile import logs
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.one_call import Model, compiled, message_of, tokens
from tests.support.attention_calls import attention
from tests.support.bounds import (
    Deviation,
    check,
    deviations,
    in_one_process,
    step,
)


def only_one_compiles() -> str:
    step = compiled(Model())
    if dist.get_rank() == 1:
        dist.barrier()
        return "did something else"
    with cp.config.patch(agreement_timeout_seconds=1.0):
        text = message_of(lambda: step(tokens()))
    dist.barrier()
    return text


def test_a_rank_that_never_comes(pools):
    text, _ = pools[2].run(only_one_compiles)
    assert "RankMismatchError: rank 0 of group" in text
    assert "compiles forward, and after 1 s rank 1 does not; needed" in text
    pools[2].close()  # the ranks have compiled differently many graphs


def compared(call, model: Model, args, given=None) -> list[Deviation]:
    """Deviations of loss and gradient; `given`: the arguments of `call`."""
    values = in_one_process(lambda alone: step(alone, alone, *args), model)
    return deviations(step(call, model, *(given or args)), *values)


def with_mask(strict: bool, hidden: int = 0) -> list[Deviation]:
    """A mask given as a tensor; so many rows see nothing."""
    torch.manual_seed(0)
    model = Model()
    mask = torch.rand(16, 16) > 0.3
    mask.fill_diagonal_(True)
    mask[:hidden] = False
    return compared(compiled(model, strict=strict), model, (tokens(), mask))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("hidden", [0, 3, 16])
def test_a_mask(pools, strict, hidden):
    for found in pools[2].run(with_mask, strict, hidden):
        check(found)


class Breaks(Model):
    def forward(self, tokens, mask=None):
        x = self.embedding(tokens) * 2
        torch._dynamo.graph_break()
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()


def warnings_of_a_break(door: str) -> list[str]:
    """What is logged while a model with a graph break is compiled."""
    logs.warn_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("cpcompile")
    logger.addHandler(handler)
    try:
        if door == "plain":
            compiled(Breaks())(tokens())
        else:
            torch._dynamo.reset()
            step = torch.compile(Breaks(), backend="cp", options={"inner": "aot_eager"})
            step(cp.shard(tokens(), sequence_mesh(2), 1))
    finally:
        logger.removeHandler(handler)
    return messages


@pytest.mark.parametrize(
    ("door", "cost"),
    [
        ("plain", "gathered there on every rank, 0.0 MiB: x [2, 16, 32]"),
        ("dtensor", "values cross it as DTensors"),
    ],
)
def test_a_graph_break_is_one_warning(pools, door, cost):
    for messages in pools[2].run(warnings_of_a_break, door):
        (message,) = messages
        assert message.startswith("graph break in forward at ")
        assert "test_refusals.py:" in message and cost in message
        assert "Results stay correct" in message


class WritesThroughView(Model):
    def forward(self, tokens, mask=None):
        x = self.embedding(tokens).clone()
        x[:, 0].mul_(0.0)  # a view of the sharded dimension
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return y.square().mean()


def write_through_view(strict: bool, door: str) -> list[Deviation]:
    torch.manual_seed(0)
    model = WritesThroughView()
    call, given = compiled(model, strict=strict), tokens()
    if door == "dtensor":
        given = cp.shard(given, sequence_mesh(2), 1)
        call = torch.compile(
            model, backend="cp", options={"strict": strict, "inner": "aot_eager"}
        )
    return compared(call, model, (tokens(),), (given,))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_a_write_through_a_view(pools, door, strict):
    for found in pools[2].run(write_through_view, strict, door):
        check(found)


class WritesArgument(Model):
    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        mask[:, 0] = x[..., 0]
        return super().forward(tokens) + mask.mean()


def write_to_argument(strict: bool) -> list[Deviation]:
    torch.manual_seed(0)
    model = WritesArgument()
    call = compiled(model, strict=strict)

    def values(call):
        argument = torch.zeros(2, 2, 16)  # of the default dtype
        return {"loss": call(tokens(), argument), "argument": argument}

    return deviations(values(call), *in_one_process(values, model))


@pytest.mark.parametrize("strict", [True, False])
def test_a_write_to_an_argument_reaches_the_caller(pools, strict):
    for found in pools[2].run(write_to_argument, strict):
        check(found)


def lonely_ring() -> str:
    """Rank 1 leaves; rank 0 waits for a message that never comes."""
    pg = dist.new_group(timeout=datetime.timedelta(seconds=5))
    if dist.get_rank() == 1:
        return "left"
    q = torch.randn(1, 1, 4, 8)
    group = pg.group_name
    try:
        attention("ring")(q, q, q, 8, 8, False, 1.0, group)
    except RuntimeError as error:
        return "\n".join([str(error), *error.__notes__])
    return "nothing was raised"


@pytest.mark.timeout(120)
def test_a_missing_peer_is_torchs_error_with_our_call_site(pools):
    text, _ = pools[2].run(lonely_ring, timeout=60)
    pools[2].close()  # first of all: gloo has closed the connection
    assert "Timed out" in text or "Connection closed" in text
    assert (
        "this exchange belongs to keys and values of the forward of ring attention, "
        "step 0" in text
    )
