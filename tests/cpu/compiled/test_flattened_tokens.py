"""nn.TransformerEncoder on uneven parts gathers nothing between its layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import ModuleEncoder, SequenceFirst
from tests.support.bounds import Deviation, check, deviations, in_one_process, step


def messages(
    make: type[ModuleEncoder], inner: str, tokens: int
) -> tuple[list[Deviation], Counter[str]]:
    """Errors of a step on 2 ranks, and the collectives in it, by name."""
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
    return found, Counter(name.split("::")[1] for name in names)


@pytest.mark.parametrize("make", [ModuleEncoder, SequenceFirst])
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("tokens", [16, 17])
def test_nothing_is_gathered(pools, tokens, inner, make):
    """Sums of the loss and of gradients are all that is sent besides attention."""
    for found, sent in pools[2].run(messages, make, inner, tokens, timeout=240):
        check(found)
        assert sent["all_reduce"] + sent["all_reduce_"] > 0
        assert sent["all_gather_into_tensor"] == 0, sent
