"""nn.TransformerEncoder on uneven parts gathers nothing between its layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import ModuleEncoder, SequenceFirst
from tests.support.bounds import check, deviations, in_one_process, step


@pytest.mark.parametrize("make", [ModuleEncoder, SequenceFirst])
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("tokens", [16, 17])
@on_ranks(2, timeout=240)
def test_nothing_is_gathered(tokens, inner, make):
    """Sums of the loss and of gradients are all that is sent besides attention."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 50, (2, tokens))
    values = in_one_process(lambda alone: step(alone, alone, ids), model)
    options = {"mesh": sequence_mesh(2), "strategy": "ring", "inner": inner}
    call = torch.compile(model, backend="cp", options=options)
    found = deviations(step(call, model, ids), *values)
    with torch.profiler.profile() as profile:
        call(ids).backward()
    names = (e.name for e in profile.events() if "c10d_functional::" in e.name)
    sent = Counter(name.split("::")[1] for name in names)
    check(found)
    assert sent["all_reduce"] + sent["all_reduce_"] > 0
    assert sent["all_gather_into_tensor"] == 0, sent
