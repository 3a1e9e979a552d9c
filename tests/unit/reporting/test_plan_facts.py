"""What a plan implies: exclusions by reason, and layouts."""

import cpcompile as cp
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.plan_facts import candidate_notes, plan_layouts


def a_plan(**changes):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 8192}
    return cp.plan(**(sizes | {"ranks": 4} | changes))


def test_notes_group_candidates_by_reason():
    notes = candidate_notes(a_plan(kv_seq=4096))
    assert notes == [
        "ring zigzag, all_gather zigzag, hybrid 2 in 2 (ring) zigzag, "
        "hybrid 2 (ring) in 2 zigzag are out: zigzag needs as many queries as keys",
        "ring striped, all_gather striped, hybrid 2 in 2 (ring) striped, "
        "hybrid 2 (ring) in 2 striped are out: striped needs as many queries as keys",
    ]
    assert candidate_notes(a_plan()) == []


def test_layouts_stand_in_their_own_order():
    assert plan_layouts(a_plan()) == (
        Layout.CONTIGUOUS,
        Layout.ZIGZAG,
        Layout.STRIPED,
    )
    assert plan_layouts(a_plan(layout="fold")) == (Layout.FOLD,)
