"""Section e: compile what the timed sections need, and say what came out.

Many processes at a time: Triton's and Inductor's caches on disk then hold every kernel,
so that the sections that time find them compiled. A row per kernel: registers, spills,
shared memory. The peak memory of a step is measured here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from cpcompile.geometry.visibility import ALL
from cpcompile.kernels import launch, render
from cpcompile.kernels.configs import Kernel, StepConfig
from tools.gpu import configs, rates, ring
from tools.gpu.peers import flex_forward
from tools.gpu.rates import CAUSAL
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import normal

# Every shard size of the rings, each by the ring that has all its kinds of steps.
RINGS = (
    *((128 * 1024, 2), (128 * 1024, 4), (64 * 1024, 4), (32 * 1024, 4)),
    *((16 * 1024, 4), (8 * 1024, 4), (8 * 1024, 8)),
)
MEMORY_TOKENS = 8192


class _Recorder:
    """A stand-in for a JIT function that keeps the compiled kernels it launches."""

    def __init__(self, function: Any, kernels: list[Any]) -> None:
        self.function, self.kernels = function, kernels

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            self.kernels.append(self.function[grid](*args, **options))

        return run


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Collect the compiled kernels that cpcompile.kernels.launch launches meanwhile."""
    kernels: list[Any] = []

    def rendered(*args: Any) -> render.RenderedKernel:
        found = render.rendered(*args)
        return dataclasses.replace(found, function=_Recorder(found.function, kernels))

    with mock.patch.object(launch, "rendered", rendered):
        yield kernels


def binary_rows(kernels: list[Any], name: str, seconds: float) -> list[Row]:
    """Make one row per different kernel; `seconds` is the time to compile them all."""
    return [
        {
            "name": name,
            "registers": kernel.n_regs,
            "spills": kernel.n_spills,
            "shared_bytes": kernel.metadata.shared,
            "compile_seconds": seconds,
        }
        for kernel in {id(kernel): kernel for kernel in kernels}.values()
    ]


@dataclass(frozen=True)
class CandidateItem:
    """One config of one kernel, full and causal, as section c times it."""

    kernel: Kernel
    dim: int
    causal: bool
    config: StepConfig

    def __str__(self) -> str:
        values = " ".join(str(x) for x in asdict(self.config).values())
        mask = "causal" if self.causal else "full"
        return f"{self.kernel.value} D={self.dim} {mask} accumulating, {values}"

    def run(self, mode: Mode) -> list[Row]:
        call = configs.step_call(self.kernel, self.dim, 1024, 1, mode)
        begin = time.perf_counter()
        with recorded() as kernels:
            call(CAUSAL if self.causal else ALL, self.config)
        return binary_rows(kernels, str(self), time.perf_counter() - begin)


@dataclass(frozen=True)
class RateKernelsItem:
    """The kernels of section b that section c does not have."""

    dim: int
    causal: bool

    def __str__(self) -> str:
        return f"D={self.dim} {'causal' if self.causal else 'full'}, not accumulating"

    def run(self, mode: Mode) -> list[Row]:
        q, k, v, grad = (normal((1, 1, 1024, self.dim), mode) for _ in range(4))
        visible = CAUSAL if self.causal else ALL
        rows = []
        for name in ("step", "dkdv", "dq"):
            forward, backward = rates.step_calls(q, k, v, grad, visible)
            begin = time.perf_counter()
            with recorded() as kernels:
                (forward | backward)[name]()
            seconds = time.perf_counter() - begin
            rows += binary_rows(kernels, f"{name} {self}", seconds)
        return rows


@dataclass(frozen=True)
class RingKernelsItem:
    """The kernels of section d: the sizes of slices are constants of a kernel."""

    tokens: int
    ranks: int

    def __str__(self) -> str:
        return f"ring of {self.ranks} ranks, shards of {self.tokens // self.ranks}"

    def run(self, mode: Mode) -> list[Row]:
        # Half of the heads: the kernels are the same, and the others need memory too.
        q, k, v = ring.operands(self.tokens, ring.HEADS // 2, ring.DIM, mode)
        rows = []
        for layout in ring.Layout:
            qs, ks, vs = (layout.shards(x, self.ranks) for x in (q, k, v))
            begin = time.perf_counter()
            with recorded() as kernels:
                for rank in range(self.ranks):
                    ring.ring_rank(qs[rank], ks, vs, rank, layout)
            seconds = time.perf_counter() - begin
            rows += binary_rows(kernels, f"{self}, {layout.value}", seconds)
        return rows


@dataclass(frozen=True)
class FlexItem:
    """FlexAttention of section b."""

    rate: rates.RateItem

    def __str__(self) -> str:
        return f"flex {self.rate}"

    def run(self, mode: Mode) -> list[Row]:
        shape = (1, rates.HEADS, self.rate.tokens, self.rate.dim)
        q, k, v = (normal(shape, mode).requires_grad_() for _ in range(3))
        begin = time.perf_counter()
        out = flex_forward((q, k, v), self.rate.causal, mode)()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return [{"name": str(self), "compile_seconds": time.perf_counter() - begin}]


@dataclass(frozen=True)
class MemoryItem:
    """The memory that a step needs beyond its operands."""

    def __str__(self) -> str:
        return f"memory, H={ring.HEADS} S={MEMORY_TOKENS} D={ring.DIM}"

    def run(self, mode: Mode) -> list[Row]:
        shape = (1, ring.HEADS, MEMORY_TOKENS, ring.DIM)
        q, k, v, grad = (normal(shape, mode) for _ in range(4))
        forward, backward = rates.step_calls(q, k, v, grad, ALL)
        shard = q.nbytes
        rows = []
        for name in ("step_acc", "dkdv_acc", "dq_acc"):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = (forward | backward)[name]()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            parts = result if isinstance(result, tuple) else (result,)
            rows.append(
                {
                    "name": name,
                    "peak_mib": peak / 2**20,
                    "results_mib": sum(x.nbytes for x in parts) / 2**20,
                    "q_mib": shard / 2**20,
                }
            )
            del result, parts
        return rows


def plan(mode: Mode) -> list[Any]:
    """List what takes longest first, then defaults before candidates."""
    if mode.smoke:  # the interpreter compiles nothing
        return []
    masks = (False, True)
    if mode.quick:
        return _candidates(mode)
    return [
        *(RingKernelsItem(*ring) for ring in RINGS),
        *(FlexItem(rate) for rate in rates.plan(mode)),
        *(RateKernelsItem(d, causal) for d in rates.DIMS for causal in masks),
        *_candidates(mode),
        MemoryItem(),
    ]


def _candidates(mode: Mode) -> list[CandidateItem]:
    found = [
        (index, CandidateItem(item.kernel, item.dim, causal, config))
        for item in configs.plan(mode)
        for index, config in enumerate(configs.candidates(item.kernel, item.dim, mode))
        for causal in (False, True)
    ]
    found.sort(key=lambda pair: pair[0])
    return [item for _, item in found]
