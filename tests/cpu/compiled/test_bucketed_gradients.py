"""Gradients that the graph sums travel in buckets, and little else is sent."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from cpcompile import config
from tests.cpu.attention_cases import compiled_on
from tests.cpu.composition.training import GPT
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import ModuleEncoder, SequenceFirst
from tests.support.bounds import check, deviations, in_one_process, step

MEGABYTE = 2**20


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("length", [32, 33], ids=["even", "uneven"])
@pytest.mark.parametrize("megabytes", [25.0, 0.008, 0.0], ids=["one", "small", "off"])
@on_ranks(2)
def test_gradients_travel_in_buckets(megabytes: float, length: int) -> None:
    model = WithLoss()
    tokens = torch.randint(0, 32, (2, length))
    values = in_one_process(lambda alone: step(alone, alone, tokens), model)
    with config.patch(gradient_bucket_megabytes=megabytes):
        compiled = compiled_on(2, model, inner="inductor", strategy="ring")
        found = deviations(step(compiled, model, tokens), *values)
        loss = compiled(tokens)
        with torch.profiler.profile() as profile:
            loss.backward()
    sent = Counter(e.name for e in profile.events() if "all_reduce" in e.name)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    check(found)
    count = sum(n for name, n in sent.items() if name.startswith("_c10d_functional"))
    if megabytes:
        assert 1 <= count <= size / (megabytes * MEGABYTE) + 2, sent
    else:
        # The head's is complete: logits are gathered where the last is cut off.
        assert count == len(list(GPT().parameters())) - 1, sent


@pytest.mark.parametrize("make", [ModuleEncoder, SequenceFirst])
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("tokens", [16, 17])
@on_ranks(2, timeout=240)
def test_nothing_is_gathered(tokens, inner, make):
    """Sums of the loss and of gradients are all that is sent besides attention."""
    model, ids = make(), torch.randint(0, 50, (2, tokens))
    values = in_one_process(lambda alone: step(alone, alone, ids), model)
    call = compiled_on(2, model, inner=inner, strategy="ring")
    found = deviations(step(call, model, ids), *values)
    with torch.profiler.profile() as profile:
        call(ids).backward()
    names = (e.name for e in profile.events() if "c10d_functional::" in e.name)
    sent = Counter(name.split("::")[1] for name in names)
    check(found)
    assert sent["all_reduce"] + sent["all_reduce_"] > 0
    assert sent["all_gather_into_tensor"] == 0, sent
