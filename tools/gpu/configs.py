"""Section c: every candidate config of every step kernel, to choose the defaults from.

A step inside of a ring: float32 accumulators in and out. The candidates of one kernel
and head dim take turns, on a full chunk and on a causal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.kernels import launch
from cpcompile.kernels.configs import (
    STEP_KERNELS,
    Kernel,
    StepConfig,
    architecture,
    configs,
    padded,
)
from cpcompile.kernels.constants import RowLimits
from tools.gpu.rates import CAUSAL, HEADS, SMOKE_HEADS, SMOKE_TOKENS
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import (
    DKDV_FLOPS,
    DQ_FLOPS,
    forward_flops,
    interleaved,
    normal,
    tflops,
)

TOKENS = 8192
DIMS = (128, 64)
MASKS = {"full": ALL, "causal": CAUSAL}
FLOPS = {Kernel.FORWARD: 1.0, Kernel.DKDV: DKDV_FLOPS, Kernel.DQ: DQ_FLOPS}


def candidates(
    kernel: Kernel, dim: int, mode: Mode, dtype: torch.dtype = torch.bfloat16
) -> tuple[StepConfig, ...]:
    """Return the configs for this device, default first."""
    name = launch.INTERPRETED_ARCHITECTURE
    if mode.device == "cuda":
        name = architecture(torch.device("cuda", torch.cuda.current_device()))
    return configs(kernel, name, dtype, padded(dim))


@dataclass(frozen=True)
class ConfigItem:
    """All candidates of one kernel for one head dim."""

    kernel: Kernel
    dim: int

    def __str__(self) -> str:
        return f"{self.kernel.value} D={self.dim}"

    def run(self, mode: Mode) -> list[Row]:
        heads, tokens = (SMOKE_HEADS, SMOKE_TOKENS) if mode.smoke else (HEADS, TOKENS)
        found = candidates(self.kernel, self.dim, mode)
        call = step_call(self.kernel, self.dim, tokens, heads, mode)
        functions = {
            f"{index} {name}": _with(call, visible, config)
            for index, config in enumerate(found)
            for name, visible in MASKS.items()
        }
        times = interleaved(functions, mode, seconds=2.0)
        rows = []
        for index, config in enumerate(found):
            row: Row = {
                "kernel": self.kernel.value,
                "dim": self.dim,
                "config": asdict(config),
                "default": index == 0,
            }
            for name, visible in MASKS.items():
                pairs = visible.pairs(tokens, tokens)
                flops = forward_flops(1, heads, pairs, self.dim) * FLOPS[self.kernel]
                ms = times.milliseconds.get(f"{index} {name}")
                row[name] = None if ms is None else tflops(flops, ms)
                if error := times.errors.get(f"{index} {name}"):
                    row["error"] = error
            rows.append(row)
        mark_best(rows)
        return rows


def mark_best(rows: list[Row]) -> None:
    """Mark the highest geometric mean of the two masks; configs that failed are out."""

    def mean(row: Row) -> float:
        return math.sqrt((row["full"] or 0.0) * (row["causal"] or 0.0))

    for row in rows:
        row["best"] = False
    if any(map(mean, rows)):
        max(rows, key=mean)["best"] = True


def step_call(
    kernel: Kernel, dim: int, tokens: int, heads: int, mode: Mode
) -> Callable[[Visible, StepConfig | None], object]:
    """Return a function that calls one kernel on one chunk, with accumulators."""
    torch.manual_seed(0)
    shape = (1, heads, tokens, dim)
    q, k, v, grad = (normal(shape, mode) for _ in range(4))
    first, second = (normal(shape, mode, torch.float32) for _ in range(2))
    # About what this chunk gives, so that no exponent is extreme.
    lse = torch.full(shape[:3], math.log(tokens) + 0.5, device=mode.device)
    delta = torch.zeros_like(lse)
    scale = dim**-0.5

    def call(
        visible: Visible, config: StepConfig | None
    ) -> tuple[Tensor, ...] | list[Tensor]:
        rest = (RowLimits(visible), scale, False)
        if kernel is Kernel.FORWARD:
            return launch.forward(q, k, v, first, lse, *rest, config=config)
        sums = [first, second] if kernel is Kernel.DKDV else [first]
        operands = (grad, q, k, v, lse, delta, sums)
        return launch.gradients(kernel, *operands, *rest, config=config)

    return call


def _with(
    call: Callable[[Visible, StepConfig | None], object],
    visible: Visible,
    config: StepConfig,
) -> Callable[[], object]:
    return lambda: call(visible, config)


def plan(mode: Mode) -> list[ConfigItem]:
    """List all kernels, the larger head dim first."""
    dims = (32,) if mode.smoke else (128,) if mode.quick else DIMS
    return [ConfigItem(kernel, dim) for dim in dims for kernel in STEP_KERNELS]
