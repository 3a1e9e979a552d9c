"""Blocks that repeat are compiled once, and compute what each would have computed.

Every kind of model is compared with one process, in float64, and with the same program
whose blocks are compiled one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, check, deviations
from tests.support.forms.repeated_models import Kind, new_model, two_steps
from tests.support.settings import split

LAYERS = 4


@dataclass(frozen=True)
class Ran:
    """Of two steps: errors and values; how many blocks were folded in each row."""

    errors: list[Deviation]
    values: Values
    folded: list[int]


def run(
    kind: Kind, given: dict[str, object], folds: bool, dynamic: bool = False
) -> Ran:
    torch._dynamo.reset()
    model = new_model(kind, LAYERS)
    options, settings = split(
        {"mesh": sequence_mesh(2), "fold_repeated_blocks": folds, **given}
    )
    compiled = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    with recording() as reports, settings:
        values = two_steps(compiled, model)
    errors = []
    if not kind.dropout and not kind.attention_dropout:  # other random numbers
        alone = new_model(kind, LAYERS)
        errors = deviations(values, two_steps(alone, alone))
    return Ran(errors, values, [x.count for x in reports[0].folded])


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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "given"), KINDS.values(), ids=KINDS)
def test_numbers_are_those_of_separate_blocks(pools, kind, given):
    folded = pools[2].run(run, kind, given, True, timeout=400)
    separate = pools[2].run(run, kind, given, False, timeout=400)
    for one, other in zip(folded, separate, strict=True):
        if kind.attention_dropout:  # draws from a generator: stays as it is
            assert one.folded == []
        else:
            assert min(one.folded) >= 3 and len(one.folded) == 2
        check_pair(one, other)


def check_pair(one: Ran, other: Ran) -> None:
    """The numbers are right, and those of separate blocks."""
    assert other.folded == []
    check(one.errors)
    check(deviations(one.values, other.values))  # the last bits may differ


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_length_that_is_a_symbol(pools):
    kind, given = Kind(), {"strategy": "ring", "layout": "zigzag"}
    folded = pools[2].run(run, kind, given, True, True, timeout=400)
    separate = pools[2].run(run, kind, given, False, True, timeout=400)
    for one, other in zip(folded, separate, strict=True):
        assert min(one.folded) >= 3 and len(one.folded) == 2
        check_pair(one, other)
