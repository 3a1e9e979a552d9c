"""Scans, torch's higher-order operators, become calls that ranks can share."""

import pytest
import torch

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.support.scans import Associative, Elman, Recurrence

in_two = pytest.mark.parametrize("mesh_of", [2], indirect=True)


def steps(module, mesh, batch=1, strategy="exchange"):
    """The steps of the passes, with a strategy whatever it costs."""
    return capture(
        module,
        torch.zeros(1, 1, 1).expand(batch, 64, 32),
        mesh=mesh,
        shard={"x": 1},
        strategy=strategy,
        until="exchange_mixers",
    )


@in_two
def test_a_scan_is_shared_by_channels(mesh_of):
    captured = steps(Recurrence(), mesh_of)
    assert captured["fold_scans"].rewrites == 1
    assert_golden(
        changes(captured["fold_scans"]),
        """\
+ cp_scan = cp_scan('scan', 1, 2, x, movedim, movedim_1)
- scan_combine_fn_0 = get_attr scan_combine_fn_0
- scan = scan(scan_combine_fn_0, [x], [movedim, movedim_1], [])
- out = scan[1]
+ out = cp_scan[1]""",
    )
    assert_golden(
        changes(captured["exchange_mixers"]),
        """\
+ exchanged = exchanged(movedim, 0, 2)
+ exchanged_1 = exchanged(movedim_1, 0, 2)
- cp_scan = cp_scan('scan', 1, 2, x, movedim, movedim_1)
+ cp_scan = cp_scan('scan', 1, 2, x, exchanged, exchanged_1)
+ exchanged_2 = exchanged(out, 2, 0)
- out_1 = movedim(out, 0, 1)
+ out_1 = movedim(exchanged_2, 0, 1)""",
    )


@in_two
def test_the_operator_of_an_associative_scan(mesh_of):
    captured = steps(Associative(), mesh_of)
    assert_golden(
        changes(captured["fold_scans"]),
        """\
+ cp_scan = cp_scan('associative_scan', 0, 2, child, child_1)
+ y_1 = cp_scan[1]
- select_copy = select_copy(child, 0, 0)
- select_copy_1 = select_copy(child_1, 0, 0)
- associative_scan_combine_fn_0 = get_attr associative_scan_combine_fn_0
- associative_scan = associative_scan(associative_scan_combine_fn_0, [child, child_1],
    ())
- y_1 = associative_scan[1]""",
    )
    assert captured["exchange_mixers"].rewrites == 1


@in_two
def test_an_associative_scan_of_the_tokens_of_a_rank(mesh_of):
    """A scan that is not associative has no such strategy."""
    captured = steps(Associative(), mesh_of, strategy="states")
    assert_golden(
        changes(captured["exchange_mixers"]),
        """\
- cp_scan = cp_scan('associative_scan', 0, 2, child, child_1)
+ cp_scan = scanned_in_parts('associative_scan', 0, 2, child, child_1)""",
    )
    captured = steps(Recurrence(), mesh_of, strategy="states")
    assert "exchanged" in changes(captured["exchange_mixers"])


@in_two
def test_a_step_that_mixes_channels_is_not_shared(mesh_of):
    """Of one row nothing keeps apart; two rows do."""
    assert steps(Elman(), mesh_of)["exchange_mixers"].rewrites == 0
    assert steps(Elman(), mesh_of, batch=2)["exchange_mixers"].rewrites == 1
