"""A budget makes Ulysses exchange heads in groups: exact, and the same bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import cpcompile as cp
from cpcompile import config
from cpcompile.accounting.graph_account import GraphDirection, Kind, Purpose
from tests.cpu.against_one_process import (
    Checkpointed,
    compare,
    compare_calls,
    hidden_states,
)
from tests.cpu.on_ranks import on_ranks

HEADS, DIM, WIDTH = 12, 8, 24


class Layer(nn.Module):
    """Attention of 12 heads on `kv_heads` of keys; causal, or within documents."""

    def __init__(self, kv_heads: int, documents: bool) -> None:
        super().__init__()
        self.kv_heads, self.documents = kv_heads, documents
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.kv_heads, self.kv_heads], 1)
        mask = None
        if self.documents:
            ids = torch.arange(x.shape[1], device=x.device) // 9
            mask = ids[:, None] == ids
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, kv_heads: int, documents: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kv_heads, documents) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def budget(kv_heads: int, tokens: int, world: int) -> int:
    """A byte less than an exchange of all heads takes."""
    sizes = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": DIM, "seq": tokens}
    whole = cp.plan(batch=2, ranks=world, dtype="float64", causal=False, **sizes)
    (ulysses,) = (c for c in whole.candidates if c.label == "ulysses")
    assert ulysses.peak_extra_bytes is not None
    return ulysses.peak_extra_bytes - 1


CASES = [
    (kv_heads, documents, tokens, world, how)
    for kv_heads in (12, 3, 2)
    for documents in (False, True)
    for tokens, world in ((37, 2), (41, 3), (32, 2))
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kv_heads", "documents", "tokens", "world", "how"), CASES)
@on_ranks("world", timeout=200)
def test_it_equals_one_process(kv_heads, documents, tokens, world, how):
    def make() -> nn.Module:
        model = Layers(kv_heads, documents)
        return Checkpointed(model) if how == "checkpoint" else model

    options = {"strategy": "ulysses"}
    options["inner"] = "inductor" if how == "inductor" else "aot_eager"
    door = "dtensor" if how == "dtensor" else "plain"
    with config.patch(memory_budget=budget(kv_heads, tokens, world)):
        found = compare(make, (2, tokens, WIDTH), world, door, **options)
    found.check()
    assert found.warnings == []
    (label,) = {c.plan.chosen.label for r in found.reports for c in r.calls if c.plan}
    assert label.startswith("ulysses in ") and label.endswith(" groups of heads")


@on_ranks(2)
def test_one_program_for_many_lengths():
    model = Layers(12, documents=False).double()
    calls = [hidden_states(n, WIDTH) for n in (40, 37, 39)]
    with config.patch(memory_budget=budget(12, 40, 2)):
        compare_calls(model, calls, 2, strategy="ulysses", dynamic=True).check()


Sent = dict[tuple[GraphDirection, Kind], tuple[int, int]]


def exchanged(kv_heads: int, limit: int | str) -> tuple[Sent, float]:
    """Messages and bytes of attention that a training step receives, and its work.

    The work is that of a rank over that of one device.
    """
    model = Layers(kv_heads, documents=False).double()
    with config.patch(memory_budget=limit):
        step = compare_calls(model, [hidden_states(40, WIDTH)], 2, strategy="ulysses")
    found: Sent = {}
    for e in step.exchanges:
        if e.purpose is Purpose.ATTENTION:
            messages, size = found.get((e.direction, e.kind), (0, 0))
            found[e.direction, e.kind] = (messages + e.messages, size + e.bytes)
    work = [account.work for report in step.reports for account in report.accounts]
    return found, sum(x.flops for x in work) / sum(x.whole_flops for x in work)


@pytest.mark.parametrize("kv_heads", [12, 2])
@on_ranks(2)
def test_groups_send_the_same_bytes(kv_heads):
    whole, share = exchanged(kv_heads, "auto")
    some, same_share = exchanged(kv_heads, budget(kv_heads, 40, 2))
    assert same_share == pytest.approx(share) == pytest.approx(0.5, rel=0.02)
    for direction in (GraphDirection.FORWARD, GraphDirection.BACKWARD):
        messages, size = whole[direction, Kind.ALL_TO_ALL]
        assert messages == 4  # there and back, in two layers
        more, same = some[direction, Kind.ALL_TO_ALL]
        assert same == size and more % messages == 0 and more > messages
