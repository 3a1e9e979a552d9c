"""Ten planted faults: cp.verify sees each, and names the first module that differs."""

from unittest import mock

import pytest

import cpcompile as cp
from tests.cpu.verification.faults import FAULTS, planted
from tests.cpu.verification.models import make_inputs, make_model

RANKS = 3  # of two ranks, each is the next one and the previous one

# What differs first, of which module, and what comes before it.
AFTER_ATTENTION = ("output", "attention.out", "the output of attention.kv")
WHERE = {
    "causal offset": AFTER_ATTENTION,
    "dKV the other way": (
        "gradient of the output",
        "attention.kv",
        "the gradient of parameter bias of attention.out",
    ),
    "KV head off by one": AFTER_ATTENTION,
    "loss averaged per rank": ("result loss", "", "the output of head"),
    # As the bias of head, what is added to the output is whole on every rank.
    "missing gradient sum": ("gradient of the output", "head", "the loss step 1"),
    "stale positions": ("output", "positions", "the output of embedding"),
    "dropped padding": AFTER_ATTENTION,
    "wrong scale": AFTER_ATTENTION,
    "bf16 accumulation": AFTER_ATTENTION,
    "no way back": ("output", "head", "the output of attention"),
}


def verify(fault):
    """The report, as every rank gets it."""
    mixes = fault == "no way back"
    layout = "zigzag" if mixes else "contiguous"
    options = {
        "strategy": "ring",
        "layout": layout,
        "inner": "aot_eager",
        "tile": 0,
    }
    inputs = make_inputs(padded=fault == "dropped padding")
    with planted(fault), cp.config.patch(hardware="cpu"):
        return cp.verify(make_model(mixes=mixes), options=options, **inputs)


def test_every_fault_has_its_place():
    assert FAULTS.keys() == WHERE.keys() and len(FAULTS) == 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_at_its_module(pools, fault):
    reports = pools[RANKS].run(verify, fault, timeout=170)
    first, *others = reports
    what, path, after = WHERE[fault]
    assert not first.ok and first.exit_code == 1
    assert first.first is not None, first
    assert [x.first for x in others] == [first.first] * (RANKS - 1)
    place = first.first
    assert (place.what, place.path) == (what, path), place
    assert place.after.startswith(after), place
    assert place.error > place.bound and place.dtype == "float32"


@pytest.mark.parametrize("fault", ["no way back", "dropped padding"])
def test_without_the_fault_the_program_is_right(pools, fault):
    report = pools[RANKS].run(verify_without, fault, timeout=170)[0]
    assert report.ok and report.exit_code == 0 and report.first is None, report


def verify_without(fault):
    """The program of a fault, without it."""
    with mock.patch.dict(FAULTS, {fault: []}):
        return verify(fault)
