"""With strict=False whatever torch.compile runs, runs, also what strict refuses."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of
from tests.cpu.programs import HEADS, WIDTH, attend
from tests.support.bounds import check, deviations, in_one_process, whole


@torch.library.custom_op("cpcompile_tests::fill_second", mutates_args=("y",))
def fill_second(x: Tensor, y: Tensor) -> Tensor:
    y.copy_(x)
    return x.clone()


@fill_second.register_fake
def _(x, y):
    return x.clone()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def out(x):
    largest = x.new_empty(x.shape[:-1])
    places = torch.empty_like(largest, dtype=torch.long)
    torch.max(x.detach(), -1, out=(largest, places))
    return x + largest[..., None]


def second_argument(x):
    y = torch.zeros_like(x)
    fill_second(x.detach(), y)
    return x + y


def attention_in_vmap(x):
    def one(y):
        q = heads(y[None])
        return F.scaled_dot_product_attention(q, q, q)[0].transpose(0, 1).flatten(1)

    return torch.func.vmap(one)(x)


def every_weight_dropped(x):
    q = heads(x)
    y = F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    return x + y.transpose(1, 2).flatten(2)


def two_masks(x):
    y = x.clone()
    rows = torch.arange(x.shape[0]) % 2 == 0
    y[rows, torch.tensor([0])] = 0.5
    return y


def results_of_unknown_size(x):
    return x * x[x > 0.5].mean().sigmoid()


REFUSED = (attention_in_vmap, every_weight_dropped)
OTHERS = (out, second_argument, two_masks, results_of_unknown_size)
"""Strict may run them or refuse them: torch breaks a graph there, or writes."""


class Model(nn.Module):
    def __init__(self, part) -> None:
        super().__init__()
        self.part = part
        self.embedding = nn.Embedding(50, WIDTH)

    def forward(self, tokens):
        return attend(self.part(attend(self.embedding(tokens)))).square().mean()


@pytest.mark.parametrize("part", REFUSED + OTHERS, ids=lambda part: part.__name__)
@on_ranks(2)
def test_whatever_runs_runs(part):
    model = Model(part).double()
    tokens = torch.randint(50, (2, 16))

    def step(call, module=model):
        module.zero_grad()
        loss = call(tokens)
        loss.backward()
        return {"loss": loss, "gradient": module.embedding.weight.grad}

    values = in_one_process(lambda x: step(x, x), model)
    message = message_of(lambda: step(compiled_on(2, model)))
    if part in REFUSED:
        assert "RewriteError" in message or "Dropout" in message, message
    torch._dynamo.reset()
    check(deviations(step(compiled_on(2, model, strict=False)), *values))


@pytest.mark.parametrize("settings", [{}, {"memory_budget": 1}], ids=["", "whole"])
@on_ranks(2)
def test_a_cache_that_is_written_in_part(settings):
    """A write into a part of a cache that is sharded along its tokens."""
    cache, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 2, 4)

    def decode(cache, k):
        cache[:, :, :6].mul_(2.0)
        cache[:, :, 3:5] = k
        return F.scaled_dot_product_attention(k, cache, cache)

    want_cache = cache.clone()
    want = decode(want_cache, k)
    given = cp.shard(cache, sequence_mesh(2), 2)
    options = {"inner": "aot_eager", "strict": False}
    with torch.no_grad(), cp.config.patch(settings), recording() as reports:
        got = torch.compile(decode, backend="cp", options=options)(given, k)
    (report,) = reports
    assert bool([x for x in report.calls if x.plan]) is not bool(settings)
    assert (whole(got) - want).abs().max() < 1e-5
    assert torch.equal(given.full_tensor(), want_cache)
