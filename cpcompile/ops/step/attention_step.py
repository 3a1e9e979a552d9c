"""cp::attention_step: local queries meet one chunk of keys.

A ring is made of these; so is attention on gathered keys, which is one step. Every step
takes the running result of the earlier ones and returns the new one, so that nothing is
left to merge. Which keys a row sees, and what changes scores, are the arguments of
step_arguments.py. Legend as in block_attention.py.

`after` sets the order: it is a tensor, as of a message in flight, that has to exist
before the step starts. Its values are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.step_arguments import (
    StepArguments,
    StepChunk,
    fake_by_name,
    fake_sum,
)


@torch.library.custom_op("cp::attention_step", mutates_args=())
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    upper: Tensor | None,
    visible: Sequence[int],
    place: Sequence[int],
    spec: str,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q to one chunk of keys, and add that to the running (out, lse).

    Args:
        q: [B, H, R, D]; k: [B, G, K, D]; v: [B, G, K, E]. Under a mask k and v may be
            padded.
        out, lse: [B, H, R, E] and [B, H, R] of the earlier steps, in the accumulation
            dtype (float32; float64 for float64); None before the first one.
        extras, summary, upper, visible, place, spec: see step_arguments.py.
        final: return out in q's dtype, as the last step does.
        kernel: value of the StepKernel to use; under a mask of masked_step_kernel.
        after: see above.

    Returns: out and lse like the arguments. lse is the natural log-sum-exp of the
    scaled scores; rows that have seen no key yet have 0 and -inf.

    Raises: ValueError for integers that are no Visible.
    """
    chunk = StepArguments(extras, summary, upper, visible, place, spec).read()
    return plain_step(q, k, v, out, lse, chunk, final, StepKernel(kernel))


def plain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    chunk: StepChunk,
    final: bool,
    kernel: StepKernel,
) -> tuple[Tensor, Tensor]:
    """Do what cp::attention_step does."""
    work = chunk.work(q, k, kernel)
    running = RunningAttention(q, v.shape[-1], out, lse)
    work.forward(running, k, v, final)
    return running.result(final)


def _fake_step(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    q, v = arguments["q"], arguments["v"]
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return fake_sum(q, arguments["final"], v.shape[-1]), lse


fake_by_name(attention_step, _fake_step)
