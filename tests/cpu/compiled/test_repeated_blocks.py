"""Blocks that repeat are compiled once, and compute what each would have computed.

Every kind of model is compared with one process, in float64, and with the same program
whose blocks are compiled one by one.
"""

from __future__ import annotations

import pytest
import torch

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import Values, check, deviations
from tests.support.forms.repeated_models import Kind, new_model, two_steps
from tests.support.settings import split

LAYERS = 4


def run(
    kind: Kind, given: dict[str, object], folds: bool, dynamic: bool = False
) -> tuple[Values, list[int]]:
    """Values of two steps; how many blocks were folded in each row."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = new_model(kind, LAYERS)
    options, settings = split(
        {"mesh": sequence_mesh(2), "fold_repeated_blocks": folds, **given}
    )
    compiled = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    with recording() as reports, settings:
        values = two_steps(compiled, model)
    if not kind.dropout and not kind.attention_dropout:  # other random numbers
        alone = new_model(kind, LAYERS)
        check(deviations(values, two_steps(alone, alone)))
    return values, [x.count for x in reports[0].folded]


KINDS = {
    "ring-zigzag": (Kind(), {"strategy": "ring", "layout": "zigzag"}),
    "looped-ring": (Kind(), {"strategy": "ring", "unroll": 0}),
    "all_gather": (Kind(), {"strategy": "all_gather", "layout": "zigzag"}),
    "ulysses": (Kind(rotary=True), {"strategy": "ulysses"}),
    "dropout": (Kind(dropout=0.3), {"strategy": "ring", "layout": "zigzag"}),
    "attention-dropout": (Kind(attention_dropout=0.3), {"strategy": "ring"}),
    "tied": (Kind(tied=True), {"strategy": "all_gather"}),
    "checkpointed": (Kind(checkpointed=True), {"strategy": "ring"}),
    "writes": (Kind(writes=True), {"strategy": "all_gather"}),
    "tiles": (Kind(), {"strategy": "ring", "tile": 4}),
}


CASES = [(name, False) for name in KINDS] + [("ring-zigzag", True)]


@pytest.mark.timeout(800)
@pytest.mark.parametrize(("name", "dynamic"), CASES)
@on_ranks(2, timeout=790)
def test_numbers_are_those_of_separate_blocks(name, dynamic):
    """The last bits may differ; `dynamic`: the length is a symbol."""
    kind, given = KINDS[name]
    one, folded = run(kind, given, True, dynamic)
    other, none = run(kind, given, False, dynamic)
    if kind.attention_dropout:  # draws from a generator: stays as it is
        assert folded == []
    else:
        assert min(folded) >= 3 and len(folded) == 2
    assert none == []
    check(deviations(one, other))
