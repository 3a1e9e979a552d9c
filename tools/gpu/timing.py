"""Time functions on the GPU that take turns, and count what they compute.

The host is given a head start before each sample: the GPU sleeps while the call is
enqueued, so that a time is that of the GPU and not of Python. As in
triton.testing.do_bench, the L2 cache is overwritten before, and the median counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.gpu.sections import Mode

FLUSH_BYTES = 2**28  # more than the L2 cache of any GPU
CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, about
LONGEST_SLEEP_SECONDS = 0.05
FEWEST_ROUNDS, MOST_ROUNDS = 3, 40
BACKWARD_FLOPS = 2.5  # of those of the forward: 5 matrix products instead of 2
# dK and dV need 4 products, dQ 3: two are computed by both kernels.
DKDV_FLOPS, DQ_FLOPS = 2.0, 1.5

Function = Callable[[], object]


@dataclass
class Times:
    """Medians of functions that took turns, and the functions that failed."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(
        default_factory=dict
    )  # of the middle half, / median
    errors: dict[str, str] = field(default_factory=dict)
    rounds: int = 0


def interleaved(
    functions: Mapping[str, Function], mode: Mode, seconds: float = 0.5
) -> Times:
    """Call all functions in turn, for about `seconds`, at least three times."""
    times = Times()
    host: dict[str, float] = {}
    total = 0.0
    for name, function in functions.items():
        try:
            function()  # compiles
            _wait(mode)
            start = time.perf_counter()
            function()
            host[name] = time.perf_counter() - start
            _wait(mode)
            total += time.perf_counter() - start
        except Exception as error:  # that peer cannot do it; the others can
            times.errors[name] = f"{type(error).__name__}: {error}"[:500]
    if not host:
        return times
    wanted = int(min(seconds / total, MOST_ROUNDS))
    times.rounds = 1 if mode.smoke else max(wanted, FEWEST_ROUNDS)
    samples: dict[str, list[float]] = {name: [] for name in host}
    for _ in range(times.rounds):
        for name, found in samples.items():
            found.append(_sample(functions[name], host[name], mode))
    for name, found in samples.items():
        found.sort()
        median = statistics.median(found)
        times.milliseconds[name] = median
        quarter = len(found) // 4
        times.spread[name] = (found[-1 - quarter] - found[quarter]) / median
    return times


def _sample(function: Function, host_seconds: float, mode: Mode) -> float:
    """Return the milliseconds of one call."""
    if mode.device != "cuda":
        begin = time.perf_counter()
        function()
        return (time.perf_counter() - begin) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ahead = min(1.5 * host_seconds + 2e-4, LONGEST_SLEEP_SECONDS)
    torch.cuda._sleep(int(ahead * CYCLES_PER_SECOND))
    _flush_buffer().zero_()
    start.record()
    result = function()
    stop.record()
    torch.cuda.synchronize()
    del result  # not earlier: freeing memory may take the host some time
    return float(start.elapsed_time(stop))


_buffers: list[Tensor] = []


def _flush_buffer() -> Tensor:
    if not _buffers:
        _buffers.append(torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda"))
    return _buffers[0]


def _wait(mode: Mode) -> None:
    if mode.device == "cuda":
        torch.cuda.synchronize()


def forward_flops(batch: int, heads: int, pairs: int, dim: int) -> float:
    """Return 4 per visible (query, key) pair and head dim: two matrix products."""
    return 4.0 * batch * heads * pairs * dim


def tflops(flops: float, milliseconds: float) -> float:
    """Return the rate in 1e12 per second."""
    return flops / milliseconds / 1e9


def normal(
    shape: tuple[int, ...], mode: Mode, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Make normally distributed numbers on the device."""
    return torch.randn(shape, device=mode.device, dtype=dtype)
