"""Faults that are planted in our operators and passes, in the process of a rank.

Each is a mistake that someone could make, and changes results or gradients without any
error. Operators look up what they call when they run, so that a patched name is enough.
"""

import dataclasses
import importlib
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.distributed.tensor import DTensor, Partial, Shard

from cpcompile.kernels.constants import RowLimits
from cpcompile.passes.placement.placement_calls import cp_unreduced


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
    def cp_loss(loss, scores, target, *rest, **options):
        mesh = scores.device_mesh
        local = loss(scores.to_local(), target.to_local())
        local = local.nan_to_num() / mesh.size()
        return DTensor.from_local(local, mesh, [Partial()], run_check=False)

    return cp_loss


def gradients_not_summed(right):
    return cp_unreduced


def positions_of_the_first_rank(right):
    def cp_shard(x, on, dim):
        if isinstance(x, DTensor) or x.is_floating_point() or x.ndim > 1:
            return right(x, on, dim)
        stale = x[: x.shape[0] // on.size]
        return DTensor.from_local(stale, on.mesh, [Shard(0)], run_check=False)

    return cp_shard


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
_EDGES = "passes.model.sharding.graph_edges"
_LOSSES = "passes.model.sharding.sharded_losses"
_RULES = "passes.model.sharding.sharding_rules"
_LOOK_UPS = "passes.model.sharding.look_up_rules"
_VALUES = "passes.placement.graph_values"
_WRITER = "passes.placement.graph_writer"

FAULTS = {
    "causal offset": [(_RING, "RingStep.chunk", one_key_more)],
    "dKV the other way": [(_STEPS, "ring_shift", gradients_back)],
    "KV head off by one": [(_RING, "Ring.own_chunk", next_key_head)],
    "loss averaged per rank": [(_LOSSES, "cp_loss", mean_of_means)],
    "missing gradient sum": [
        (module, "cp_replicate", gradients_not_summed) for module in (_EDGES, _WRITER)
    ],
    "stale positions": [
        (module, "cp_shard", positions_of_the_first_rank)
        for module in (_EDGES, _RULES, _LOOK_UPS, _VALUES)
    ],
    "dropped padding": [
        ("ops.strategies.ring_attention", "AttentionInputs.of", no_segment_ids)
    ],
    "wrong scale": [
        ("ops.strategies.ring_attention", "ring_forward", larger_scale(3)),
        ("ops.strategies.ring_attention", "ring_backward", larger_scale(6)),
    ],
    "bf16 accumulation": [(_STEPS, "attention_step", rounded_state)],
    "no way back": [("ops.comm.relayout", "_layouts", never_back)],
}
