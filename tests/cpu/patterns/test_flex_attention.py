"""flex_attention on several ranks equals torch's own in eager, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.support.forms.attention_pattern_forms import Model
from tests.support.forms.flex_forms import (
    CALLS_OF_LAYER,
    FORMS,
    LENGTH,
    SCORE_MODS,
    gradients_on_cpu,
)


@pytest.mark.parametrize(
    ("ranks", "inner"),
    [(1, "aot_eager"), (2, "aot_eager"), (3, "aot_eager"), (2, "inductor")],
)
@pytest.mark.parametrize("name", [*FORMS, *SCORE_MODS])
@on_ranks("ranks")
def test_against_eager(name: str, ranks: int, inner: str) -> None:
    model = Model((FORMS | SCORE_MODS)[name]).double()
    tokens = torch.randint(37, (2, LENGTH), generator=torch.Generator().manual_seed(0))

    with gradients_on_cpu():
        options = {"inner": inner, "shard": {"tokens": 1}}
        found = compare_calls(model, [(tokens,)], ranks, **options)
    found.check()
    assert found.rewritten == [True] * 2 * CALLS_OF_LAYER[name]
