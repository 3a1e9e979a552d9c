"""A budget makes Ulysses exchange heads in groups: exact, and the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import config
from cpcompile.accounting.graph_account import GraphDirection, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare, run
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import deviations

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
    def __init__(self, kv_heads: int, documents: bool, again: bool) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Layer(kv_heads, documents) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def budget(kv_heads: int, tokens: int, world: int) -> int:
    """A byte less than an exchange of all heads takes."""
    sizes = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": DIM, "seq": tokens}
    whole = cp.plan(batch=2, ranks=world, dtype="float64", causal=False, **sizes)
    (ulysses,) = (c for c in whole.candidates if c.label == "ulysses")
    assert ulysses.peak_extra_bytes is not None
    return ulysses.peak_extra_bytes - 1


def compared(
    kv_heads: int, documents: bool, tokens: int, world: int, how: str
) -> tuple[Comparison, set[str]]:
    """A comparison with one process, and how attention ran."""

    def make() -> nn.Module:
        return Layers(kv_heads, documents, again=how == "checkpoint")

    options = {"strategy": "ulysses"}
    if how == "inductor":
        options["inner"] = "inductor"
    door = "dtensor" if how == "dtensor" else "plain"
    limit = budget(kv_heads, tokens, world)
    with config.patch(memory_budget=limit), recording() as reports:
        found = compare(make, (2, tokens, WIDTH), world, door, **options)
    plans = [call.plan for report in reports for call in report.calls]
    return found, {plan.chosen.label for plan in plans if plan is not None}


CASES = [
    (kv_heads, documents, tokens, world, how)
    for kv_heads in (12, 3, 2)
    for documents in (False, True)
    for tokens, world in ((37, 2), (41, 3), (32, 2))
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kv_heads", "documents", "tokens", "world", "how"), CASES)
def test_it_equals_one_process(pools, kv_heads, documents, tokens, world, how):
    given = (kv_heads, documents, tokens, world, how)
    for comparison, labels in pools[world].run(compared, *given, timeout=200):
        comparison.check()
        assert comparison.warnings == []
        (label,) = labels
        assert label.startswith("ulysses in ") and label.endswith(" groups of heads")


def lengths(world: int) -> list[Comparison]:
    """Comparisons for one length after another, of which Dynamo makes a symbol."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers(12, documents=False, again=False).double()
    options = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    options["strategy"] = "ulysses"
    call = torch.compile(model, backend="cp", dynamic=True, options=options)
    found = []
    with config.patch(memory_budget=budget(12, 40, world)):
        for n in (40, 37, 39):
            x = torch.randn(2, n, WIDTH, dtype=torch.float64)
            wanted = run(model, x.clone().requires_grad_(), model)
            values = run(call, x.requires_grad_(), model)
            found.append(Comparison(deviations(values, wanted), []))
    return found


def test_one_program_for_many_lengths(pools):
    for comparisons in pools[2].run(lengths, 2, timeout=100):
        for comparison in comparisons:
            comparison.check()


def exchanged(
    kv_heads: int, limit: int | str
) -> tuple[dict[Any, tuple[int, int]], float]:
    """Messages and bytes of attention that a training step receives, and its work.

    The work is that of a rank over that of one device.
    """
    torch._dynamo.reset()
    model = Layers(kv_heads, documents=False, again=False).double()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager", "strategy": "ulysses"}
    call = torch.compile(model, backend="cp", options=options)
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64).requires_grad_()
    with config.patch(memory_budget=limit), recording() as reports:
        call(x)
    found: dict[Any, tuple[int, int]] = {}
    for report in reports:
        for account in report.accounts:
            for e in account.exchanges:
                if e.purpose is Purpose.ATTENTION:
                    key = (e.direction, e.kind)
                    messages, size = found.get(key, (0, 0))
                    found[key] = (messages + e.messages, size + e.bytes)
    work = [account.work for report in reports for account in report.accounts]
    share = sum(x.flops for x in work) / sum(x.whole_flops for x in work)
    return found, share


@pytest.mark.parametrize("kv_heads", [12, 2])
def test_groups_send_the_same_bytes(pools, kv_heads):
    limit = budget(kv_heads, 40, 2)
    whole, share = pools[2].run(exchanged, kv_heads, "auto")[0]
    some, same_share = pools[2].run(exchanged, kv_heads, limit)[0]
    assert same_share == pytest.approx(share) == pytest.approx(0.5, rel=0.02)
    for direction in (GraphDirection.FORWARD, GraphDirection.BACKWARD):
        messages, size = whole[direction, Kind.ALL_TO_ALL]
        assert messages == 4  # there and back, in two layers
        more, same = some[direction, Kind.ALL_TO_ALL]
        assert same == size and more % messages == 0 and more > messages
