"""Section f: the templates through Inductor, and the whole backend on one NCCL rank.

A rank alone has nobody to send to, so of NCCL this tells only that its group is found,
that the compiled graph runs, and that its works can be registered for a tensor and
waited for by wait_tensor, as ring_shift does it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import cpcompile.ops  # noqa: F401  (registers torch.ops.cp)
from cpcompile.ops.step import lowering
from cpcompile.ops.step.step_arguments import StepChunk
from tools.gpu import reference
from tools.gpu.rates import CAUSAL
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import interleaved, normal

# (B, H, S, D)
STEP_SHAPE, SMOKE_STEP_SHAPE = (1, 16, 8192, 128), (1, 1, 64, 16)
BACKEND_SHAPE, SMOKE_BACKEND_SHAPE = (1, 8, 2048, 128), (1, 2, 64, 16)
MODES = (None, "max-autotune-no-cudagraphs", "max-autotune")
BACKEND_TORCH = "2.13"  # the oldest; the kernels run on 2.11 too
ARGUMENTS = StepChunk.plain(STEP_SHAPE[-1] ** -0.5, CAUSAL).arguments()
RESULTS = ("out", "lse", "dk", "dv", "dq")


def steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor,
) -> tuple[Tensor, ...]:
    """Run one causal step of each operator, with accumulators."""
    ops = torch.ops.cp
    rest = (*ARGUMENTS, False, "triton")
    new_out, new_lse = ops.attention_step(q, k, v, out, lse, *rest)
    operands = (grad, q, k, v, new_lse, delta)
    new_dk, new_dv = ops.attention_step_backward(*operands, [dk, dv], "dkdv", *rest)
    (new_dq,) = ops.attention_step_backward(*operands, [dq], "dq", *rest)
    return new_out, new_lse, new_dk, new_dv, new_dq


def step_operands(mode: Mode) -> tuple[Tensor, ...]:
    """Make operands of `steps`: an earlier state that saw about as many keys."""
    torch.manual_seed(0)
    shape = SMOKE_STEP_SHAPE if mode.smoke else STEP_SHAPE
    q, k, v, grad = (normal(shape, mode) for _ in range(4))
    out, dk, dv, dq = (normal(shape, mode, torch.float32) for _ in range(4))
    lse = torch.full(shape[:3], 5.0, device=mode.device)
    return q, k, v, out, lse, grad, torch.zeros_like(lse), dk, dv, dq


@dataclass(frozen=True)
class StepItem:
    """All three operators in one compiled function against eager launches."""

    compile_mode: str | None

    def __str__(self) -> str:
        return f"steps compiled with mode {self.compile_mode or 'default'}"

    def run(self, mode: Mode) -> list[Row]:
        lowering.register()
        operands = step_operands(mode)
        expected = steps(*operands)
        torch._dynamo.reset()
        options = (
            {"backend": "aot_eager"} if mode.smoke else {"mode": self.compile_mode}
        )
        compiled = torch.compile(steps, fullgraph=True, dynamic=False, **options)
        # Results of CUDA graphs are overwritten by the next run.
        found, templates = _with_code(lambda: [x.clone() for x in compiled(*operands)])
        ratios = {
            name: reference.error_ratio(x, y, y.double(), "bfloat16")
            for name, x, y in zip(RESULTS, found, expected, strict=True)
            if name != "lse"
        }
        ratios["lse"] = reference.lse_ratio(found[1], expected[1].double(), "bfloat16")
        equal = all(map(torch.equal, found, expected))
        times = interleaved(
            {
                "eager": lambda: steps(*operands),
                "compiled": lambda: compiled(*operands),
            },
            mode,
        )
        return [
            {
                "bitwise_equal": equal,
                "templates_in_code": templates,
                "ratios": reference.for_json(ratios),
                "passed": max(ratios.values()) <= reference.ALLOWED_RATIO,
                "ms": times.milliseconds,
                "errors": times.errors,
            }
        ]


@dataclass(frozen=True)
class BackendItem:
    """torch.compile(backend=cp) of causal attention, forward and backward."""

    max_autotune: bool

    def __str__(self) -> str:
        tuned = ", max_autotune" if self.max_autotune else ""
        return f"backend cp, strategy ring, 1 rank{tuned}"

    def run(self, mode: Mode) -> list[Row]:
        if torch.__version__ < TorchVersion(BACKEND_TORCH):
            return [{"unavailable": f"the backend needs torch {BACKEND_TORCH}"}]
        from cpcompile.backend import cp  # cannot be imported by older versions

        torch.manual_seed(0)
        shape = SMOKE_BACKEND_SHAPE if mode.smoke else BACKEND_SHAPE
        q, k, v, grad = (normal(shape, mode) for _ in range(4))
        leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
        with _one_rank(mode):
            mesh = init_device_mesh(mode.device, (1,), mesh_dim_names=("cp",))
            options: dict[str, Any] = {
                "mesh": mesh,
                "shard": {"q": 2, "k": 2, "v": 2},
                "strategy": "ring",
                "inner": "aot_eager" if mode.smoke else "inductor",
            }
            torch._dynamo.reset()
            attend = torch.compile(_attend, backend=cp, options=options, fullgraph=True)
            with inductor_config.patch(max_autotune=self.max_autotune):
                out, templates = _with_code(lambda: attend(*leaves))
                grads = torch.autograd.grad(out, leaves, grad)
            functions = {}
            for name, function in (("compiled", attend), ("sdpa", _attend)):
                functions[name] = functools.partial(function, *leaves)
                functions[f"{name} and backward"] = functools.partial(
                    _with_backward, function, leaves, grad
                )
            times = interleaved(functions, mode)
        sees = reference.seen(CAUSAL, None, None, shape[2], shape[2], mode.device)
        exact = reference.exact(q, k, v, grad, sees, shape[3] ** -0.5)
        names = ("out", "dq", "dk", "dv")
        alone = _attend(*leaves)
        rough = dict(
            zip(
                names,
                (alone.detach(), *torch.autograd.grad(alone, leaves, grad)),
                strict=True,
            )
        )
        got = dict(zip(names, (out, *grads), strict=True))
        ratios = {
            name: reference.error_ratio(
                x.detach(), rough[name], exact[name], "bfloat16"
            )
            for name, x in got.items()
        }
        return [
            {
                "templates_in_code": templates,
                "ratios": reference.for_json(ratios),
                "passed": max(ratios.values()) <= reference.ALLOWED_RATIO,
                "ms": times.milliseconds,
                "errors": times.errors,
            }
        ]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _with_backward(function: Any, leaves: tuple[Tensor, ...], grad: Tensor) -> Any:
    return torch.autograd.grad(function(*leaves), leaves, grad)


@dataclass(frozen=True)
class RegisterItem:
    """A work of the process group's backend, registered for a tensor."""

    def __str__(self) -> str:
        return "register a work of NCCL, wait for the tensor"

    def run(self, mode: Mode) -> list[Row]:
        # Private; see cpcompile/ops/comm/ring_exchange.py, which does the same.
        from torch._C._distributed_c10d import (
            _get_work_registry_size,
            _register_work,
        )

        with _one_rank(mode):
            x = torch.ones(1024, device=mode.device)
            work = dist.all_reduce(x, async_op=True)
            _register_work(x, work)
            waiting = _get_work_registry_size()
            y = torch.ops._c10d_functional.wait_tensor(x)
            left = _get_work_registry_size()
            passed = waiting == 1 and left == 0 and bool((y == 1).all())
        return [{"registered": waiting, "left": left, "passed": passed}]


@contextlib.contextmanager
def _one_rank(mode: Mode) -> Iterator[None]:
    backend = "nccl" if mode.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _with_code(function: Any) -> tuple[Any, int]:
    """Return the result, and how many of our templates Inductor's code for it calls."""
    from torch._inductor.utils import run_and_get_code  # private, in 2.11 to 2.14

    result, codes = run_and_get_code(function)
    call = re.compile(r"triton_tem_fused\w*_attention_step\w*\.run\(")
    return result, sum(len(call.findall(code)) for code in codes)


def plan(mode: Mode) -> list[Any]:
    """List all items, defaults first."""
    modes = MODES[:1] if mode.smoke or mode.quick else MODES
    items: list[Any] = [StepItem(modes[0])]
    if not mode.quick:
        items += [BackendItem(False), RegisterItem()]
        items += [StepItem(x) for x in modes[1:]]
        items += [] if mode.smoke else [BackendItem(True)]
    return items
