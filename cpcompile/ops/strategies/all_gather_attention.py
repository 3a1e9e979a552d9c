"""cp::all_gather_attention: keys and values are gathered once, queries stay.

One collective instead of N - 1 hops and one or two kernel calls instead of N, for the
memory of the whole keys and values. Method: the context parallelism of Llama 3 (arXiv
2407.21783, section 3.3.2). The backward gathers again and reduce-scatters dK and dV.
The keys are gathered by gathered_keys.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Runs
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.strategies.contract import (
    Saved,
    check_inputs,
    check_mask_layout,
    register,
)
from cpcompile.ops.strategies.gathered_keys import (
    Gathered,
    Run,
    gather_keys,
    scatter_gradients,
)
from cpcompile.ops.strategies.ring_schedule import Ring, RingStep
from cpcompile.ops.strategies.ring_steps import ring_forward, step_gradients


@dataclass(frozen=True)
class GatheredRing(Ring):
    """A ring of one step, on the keys of all ranks in the order of the sequence.

    runs: of consecutive queries of this rank, if attention is causal.
    """

    runs: tuple[Run, ...] = ()

    def calls(self, step: int) -> tuple[RingStep, ...]:
        """Return the calls of the step: one for each run of causal queries."""
        if not self.is_causal:
            return super().calls(step)
        length = self.keys.length
        seen = [visible_chunk(*run, 0, length, length, True) for run in self.runs]
        return tuple(RingStep(i, visible, True) for i, visible in enumerate(seen))

    def split(self, x: Tensor) -> list[Tensor]:
        """Split queries, [B, H, tokens, ...], into parts that have their own steps."""
        counts = [count for _, count in self.runs]
        return list(x.split(counts, 2)) if self.is_causal and counts[1:] else [x]


@torch.library.custom_op("cp::all_gather_attention", mutates_args=())
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, on gathered keys and values.

    Arguments, results and errors are those of cp::ring_attention; the layout is
    contiguous or zigzag, and there is one run.
    """
    inputs = AttentionInputs.of(spec, extras)
    call = ("cp::all_gather_attention", (q, k, v), inputs, sizes, group, "forward")
    own, ring = _one_step(*call)
    return ring_forward(q, *gather_keys(k, v, own), ring)


def _gradients(
    saved: Saved, inputs: AttentionInputs, sizes: Sequence[int], group: str, *how: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients, with sums over ranks in the accumulation dtype, too."""
    grad, q, k, v, out, lse = saved
    name = "cp::all_gather_attention_backward"
    own, ring = _one_step(name, (q, k, v), inputs, sizes, group, "backward")
    keys = gather_keys(k, v, own)
    dq, totals, dbias = step_gradients(grad, q, *keys, out, lse, ring, *how)
    return dq, *scatter_gradients(totals, k, v, own), dbias


def _one_step(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    inputs: AttentionInputs,
    sizes: Sequence[int],
    group: str,
    direction: str,
) -> tuple[Gathered, GatheredRing]:
    """Check the operands; return how keys are gathered, and the step on all of them."""
    (q_len, kv_len), spec = sizes, inputs.spec
    if inputs.has_modifiers:
        check_mask_layout(Strategy.ALL_GATHER, inputs, (q_len, kv_len))
        # As for causal attention: keys in the order of the sequence.
        spec = replace(spec, is_causal=True)
    own = Gathered.of(name, operands, spec, sizes, group)
    if inputs.has_modifiers:
        check_inputs(name, operands[0], inputs, (q_len, kv_len))
    queries = Runs.contiguous(q_len, own.queries.ranks)
    who = (inputs.spec.is_causal, group, own.rank, direction)
    runs = own.runs(own.queries, own.rank)
    keys = Runs.contiguous(kv_len, 1)
    return own, GatheredRing(queries, keys, *who, inputs=inputs, runs=runs)


all_gather_attention_backward = register(all_gather_attention, _gradients)
