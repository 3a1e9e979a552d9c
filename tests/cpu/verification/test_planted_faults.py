"""Ten planted faults: cp.verify sees each, and names the first module that differs.

Each is a mistake that someone could make, and changes results or gradients without any
error. Operators look up what they call when they run, so that a patched name is enough.
"""

import dataclasses
import importlib
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
from torch.distributed.tensor import DTensor, Partial

import cpcompile as cp
from cpcompile.kernels.constants import RowLimits
from tests.cpu.verification.models import make_inputs, make_model


@contextmanager
def planted(name):
    """The fault is there inside of the block; "" plants none."""
    with ExitStack() as stack:
        for module, attribute, make in FAULTS.get(name, ()):
            owner = importlib.import_module(f"cpcompile.{module}")
            *path, last = attribute.split(".")
            for each in path:
                owner = getattr(owner, each)
            faulty = make(getattr(owner, last))
            stack.enter_context(mock.patch.object(owner, last, faulty))
        yield


def one_key_more(right):
    def limits(*args):
        chunk = right(*args)
        visible = chunk.limits.visible
        upper = visible.upper
        upper = None if upper is None else (upper[0] + 1, upper[1] + 1)
        visible = dataclasses.replace(visible, upper=upper)
        return dataclasses.replace(chunk, limits=RowLimits(visible))

    return limits


def gradients_back(right):
    def ring_shift(tensors, group, where, after=None, distance=1):
        away = -distance if "dk and dv" in where else distance
        return right(tensors, group, where, after, away)

    return ring_shift


def next_key_head(right):
    return lambda ring, k, v: right(ring, k.roll(1, 1), v.roll(1, 1))


def mean_of_means(right):
    def placed_as(x, placements):
        if x.ndim or not x.placements[0].is_partial():
            return right(x, placements)
        ranks = x.device_mesh.size()
        mean = x.to_local() * ((ranks - 1) / ranks)  # the first one has no labels
        parts = DTensor.from_local(mean, x.device_mesh, [Partial()], run_check=False)
        return right(parts, placements)

    return placed_as


def gradients_not_summed(right):
    def gradient_as(x, contract, placements):
        if not x.placements[0].is_partial():
            return right(x, contract, placements)
        return DTensor.from_local(
            x.to_local(), x.device_mesh, placements, run_check=False
        )

    return gradient_as


def positions_in_natural_order(right):
    def in_order(x, dim, tokens):
        return x if x.ndim == 1 else right(x, dim, tokens)

    return in_order


def no_segment_ids(right):
    def of(spec, extras):
        given = right(spec, extras)
        return dataclasses.replace(given, q_segment_ids=None, kv_segment_ids=None)

    return of


def larger_scale(position):
    def make(right):
        def attention(*args):
            args = list(args)
            inputs = args[position].inputs
            spec = dataclasses.replace(inputs.spec, scale=inputs.spec.scale * 1.001)
            inputs = dataclasses.replace(inputs, spec=spec)
            args[position] = dataclasses.replace(args[position], inputs=inputs)
            return right(*args)

        return attention

    return make


def rounded_state(right):
    def attention_step(*args):
        out, lse = right(*args)
        return out.bfloat16().to(out.dtype), lse

    return attention_step


def never_back(right):
    def layouts(x, dim, source, target):
        before, after = right(x, dim, source, target)
        return (before, before) if target == "contiguous" else (before, after)

    return layouts


_STEPS = "ops.strategies.ring_steps"
_RING = "ops.strategies.ring_schedule"
_EDGES = "passes.whole.edge_values"

AFTER_ATTENTION = ("output", "attention.out", "the output of attention.kv")
GRADIENT = "gradient of parameter weight"

# What is replaced; what differs first, of which module, and what comes before it.
PLANTED = {
    "causal offset": ([(_RING, "RingStep.chunk", one_key_more)], AFTER_ATTENTION),
    "dKV the other way": (
        [(_STEPS, "ring_shift", gradients_back)],
        (
            "gradient of the output",
            "attention.kv",
            "the gradient of parameter bias of attention.out",
        ),
    ),
    "KV head off by one": ([(_RING, "Ring.own_chunk", next_key_head)], AFTER_ATTENTION),
    "loss averaged per rank": (
        [(_EDGES, "placed_as", mean_of_means)],
        ("result loss", "", "the output of head"),
    ),
    "missing gradient sum": (
        [(_EDGES, "gradient_as", gradients_not_summed)],
        (GRADIENT, "head", "the gradient of the output of head"),
    ),
    "stale positions": (
        [("passes.whole.local_values", "in_order", positions_in_natural_order)],
        (GRADIENT, "positions", "the gradient of the output of positions"),
    ),
    "dropped padding": (
        [("ops.strategies.ring_attention", "AttentionInputs.of", no_segment_ids)],
        AFTER_ATTENTION,
    ),
    "wrong scale": (
        [
            ("ops.strategies.ring_attention", "ring_forward", larger_scale(3)),
            ("ops.strategies.ring_attention", "ring_backward", larger_scale(6)),
        ],
        AFTER_ATTENTION,
    ),
    "bf16 accumulation": ([(_STEPS, "attention_step", rounded_state)], AFTER_ATTENTION),
    "no way back": (
        [("ops.comm.relayout", "_layouts", never_back)],
        ("output", "head", "the output of attention"),
    ),
}
FAULTS = {name: faults for name, (faults, _) in PLANTED.items()}
RANKS = 3  # of two ranks, each is the next one and the previous one


def verify(fault):
    """The report, as every rank gets it."""
    mixes = fault == "no way back"
    layout = "zigzag" if mixes or fault == "stale positions" else "contiguous"
    options = {
        "strategy": "ring",
        "layout": layout,
        "inner": "aot_eager",
        "tile": 0,
    }
    inputs = make_inputs(padded=fault == "dropped padding")
    with planted(fault), cp.config.patch(hardware="cpu"):
        return cp.verify(make_model(mixes=mixes), options=options, **inputs)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_at_its_module(pools, fault):
    reports = pools[RANKS].run(verify, fault, timeout=170)
    first, *others = reports
    what, path, after = PLANTED[fault][1]
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
    with mock.patch.dict(FAULTS, {fault: []}):
        return verify(fault)
