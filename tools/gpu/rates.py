"""Section b: TFLOP/s of the step kernels beside flash, cuDNN and FlexAttention.

All kernels of a shape take turns in one process. `step` starts from nothing and returns
bfloat16, as the peers do; `step_acc` takes and returns float32 accumulators, as all but
the ends of a ring do; likewise dkdv, dq and dkdv_acc, dq_acc.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.kernels import launch
from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import RowLimits
from tools.gpu.peers import backwards, flex_forward, vendor_forwards
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import (
    BACKWARD_FLOPS,
    DKDV_FLOPS,
    DQ_FLOPS,
    Times,
    forward_flops,
    interleaved,
    normal,
    tflops,
)

HEADS = 16
DIMS = (128, 64)
TOKENS = (8192, 4096, 16384, 2048, 1024)  # most important first
SMOKE_TOKENS, SMOKE_HEADS = 32, 1
CAUSAL = Visible(upper=(1, 1))

Call = Callable[[], object]


@dataclass(frozen=True)
class RateItem:
    """All kernels on one chunk, forward and backward."""

    dim: int
    tokens: int
    causal: bool

    def __str__(self) -> str:
        return f"D={self.dim} S={self.tokens} {'causal' if self.causal else 'full'}"

    def run(self, mode: Mode) -> list[Row]:
        torch.manual_seed(0)
        heads = SMOKE_HEADS if mode.smoke else HEADS
        shape = (1, heads, self.tokens, self.dim)
        q, k, v, grad = (normal(shape, mode) for _ in range(4))
        visible = CAUSAL if self.causal else ALL
        flops = forward_flops(
            1, heads, visible.pairs(self.tokens, self.tokens), self.dim
        )
        leaves = tuple(x.requires_grad_() for x in (q.clone(), k.clone(), v.clone()))
        peers = vendor_forwards(leaves, self.causal)
        if not mode.quick:
            peers["flex"] = flex_forward(leaves, self.causal, mode)
        ours, ours_backward = step_calls(q, k, v, grad, visible)
        forward = interleaved(ours | peers, mode)
        calls, errors = backwards(peers, leaves, grad)
        backward = interleaved(ours_backward | calls, mode)
        backward.errors |= errors
        for name, parts in BACKWARD_SUMS.items():
            if all(part in backward.milliseconds for part in parts):
                backward.milliseconds[name] = sum(
                    backward.milliseconds[part] for part in parts
                )
        return [
            self._row("forward", forward, flops),
            self._row("backward", backward, flops),
        ]

    def _row(self, direction: str, times: Times, flops: float) -> Row:
        usual = BACKWARD_FLOPS if direction == "backward" else 1.0
        return {
            "dim": self.dim,
            "tokens": self.tokens,
            "causal": self.causal,
            "direction": direction,
            "ms": times.milliseconds,
            "tflops": {
                name: tflops(PARTS_FLOPS.get(name, usual) * flops, ms)
                for name, ms in times.milliseconds.items()
                if name != "delta"
            },
            "spread": times.spread,
            "rounds": times.rounds,
            "errors": times.errors,
        }


BACKWARD_SUMS = {
    "backward": ("dkdv", "dq"),
    "backward_acc": ("dkdv_acc", "dq_acc"),
}
PARTS_FLOPS = {
    "dkdv": DKDV_FLOPS,
    "dkdv_acc": DKDV_FLOPS,
    "dq": DQ_FLOPS,
    "dq_acc": DQ_FLOPS,
}


def step_calls(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, visible: Visible
) -> tuple[dict[str, Call], dict[str, Call]]:
    """Make calls of our kernels, forward and backward; a backward starts by `delta`."""
    scale = 1 / math.sqrt(q.shape[-1])
    limits = (RowLimits(visible), scale)
    out, lse = launch.forward(q, k, v, None, None, *limits, True)
    state = out.float(), lse

    def delta() -> Tensor:
        return (grad.float() * state[0]).sum(-1)

    operands, dkdv = (grad, q, k, v, lse, delta()), Kernel.DKDV
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    none = (None, None)
    forward: dict[str, Call] = {
        "step": lambda: launch.forward(q, k, v, *none, *limits, True),
        "step_acc": lambda: launch.forward(q, k, v, *state, *limits, False),
    }
    backward: dict[str, Call] = {
        "dkdv": lambda: launch.gradients(dkdv, *operands, [], *limits, True),
        "dkdv_acc": lambda: launch.gradients(dkdv, *operands, [dk, dv], *limits, False),
        "dq": lambda: launch.gradients(Kernel.DQ, *operands, [], *limits, True),
        "dq_acc": lambda: launch.gradients(Kernel.DQ, *operands, [dq], *limits, False),
        "delta": delta,
    }
    return forward, backward


def plan(mode: Mode) -> list[RateItem]:
    """List full and causal shapes, both head dims, by length."""
    if mode.smoke:
        return [RateItem(32, SMOKE_TOKENS, causal) for causal in (False, True)]
    if mode.quick:
        return [RateItem(128, 8192, causal) for causal in (False, True)]
    return [
        RateItem(dim, tokens, causal)
        for tokens in TOKENS
        for dim in DIMS
        for causal in (False, True)
    ]
