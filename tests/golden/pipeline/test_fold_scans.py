"""Scans, torch's higher-order operators, become calls that ranks can share."""

import torch

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.support.scans import Associative, Elman, Recurrence

MESH_AXES = {"cp": 2}


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


def test_a_scan_is_shared_by_channels(mesh):
    captured = steps(Recurrence(), mesh)
    assert captured["fold_scans"].rewrites == 1
    assert_golden(
        changes(captured["fold_scans"]),
        """\
+ cp_scan = cp_scan('scan', 1, 2, x, movedim, movedim_1)
~ out_1: scan[1] -> cp_scan[1]
- get_attr scan_combine_fn_0, scan""",
    )
    assert_golden(
        changes(captured["exchange_mixers"]),
        """\
+ constraint = constraint(movedim, 'exchanged', 0, 2)
+ constraint_1 = constraint(movedim_1, 'exchanged', 0, 2)
~ cp_scan: movedim -> constraint, movedim_1 -> constraint_1
+ constraint_2 = constraint(cp_scan[1], 'exchanged', 2, 0)
~ out_1: cp_scan[1] -> constraint_2""",
    )


def test_the_operator_of_an_associative_scan(mesh):
    captured = steps(Associative(), mesh)
    assert_golden(
        changes(captured["fold_scans"]),
        """\
+ cp_scan = cp_scan('associative_scan', 0, 2, child, child_1)
~ movedim_2: associative_scan[1] -> cp_scan[1]
- select_copy, select_copy, get_attr associative_scan_combine_fn_0, associative_scan""",
    )
    assert captured["exchange_mixers"].rewrites == 1


def test_an_associative_scan_of_the_tokens_of_a_rank(mesh):
    """A scan that is not associative has no such strategy."""
    captured = steps(Associative(), mesh, strategy="states")
    assert_golden(
        changes(captured["exchange_mixers"]),
        """\
+ cp_scan = scanned_in_parts('associative_scan', 0, 2, child, child_1)
- cp_scan""",
    )
    captured = steps(Recurrence(), mesh, strategy="states")
    assert "exchanged" in changes(captured["exchange_mixers"])


def test_a_step_that_mixes_channels_is_not_shared(mesh):
    """Of one row nothing keeps apart; two rows do."""
    assert steps(Elman(), mesh)["exchange_mixers"].rewrites == 0
    assert steps(Elman(), mesh, batch=2)["exchange_mixers"].rewrites == 1
