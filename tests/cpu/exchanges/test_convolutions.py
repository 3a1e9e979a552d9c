"""Models with convolutions over their tokens equal one process, in every layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cpu.against_one_process import compare_calls
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.forms.convolved_forms import FORMS, TWINS, Model

CASES = [
    *(
        # A grid has whole rows.
        (name, ranks, 24 if (name, length) == ("grid", 13) else length, {})
        for name in FORMS
        for length, ranks in ((16, 1), (16, 2), (13, 3), (20, 4))
    ),
    # Convolutions see the tokens in order.
    *(
        (name, 3, 18, {"strategy": "ring", "layout": layout})
        for name in ("sliced_dilated", "padded")
        for layout in ("contiguous", "zigzag", "striped", "fold")
    ),
    *((name, 2, 17, {"inner": "inductor"}) for name in ("sliced", "conformer")),
    *((name, 2, 16, {}) for name in TWINS),
]


@pytest.mark.parametrize(("name", "ranks", "length", "options"), CASES)
@on_ranks("ranks")
def test_forms(name, ranks, length, options):
    model = Model(name).double()
    tokens = torch.randint(23, (2, length), generator=torch.Generator().manual_seed(0))
    compare_calls(model, [(tokens,)], ranks, **options).check()
    compiled = compiled_on(ranks, model, **options)
    compiled(tokens)
    with torch.profiler.profile() as profile:
        compiled(tokens)
    calls = Counter(event.name for event in profile.events())
    if name in TWINS or "inner" in options:
        assert calls["cp::moved_tokens"] > 0
    else:
        assert calls["cp::moved_tokens"] == (
            0 if ranks == 1 or (name == "grid" and length // 4 % ranks) else 2
        )
