"""Which kernel computes a ring step: ours, aten's flash attention, or plain math."""

from __future__ import annotations

import importlib.util
from enum import Enum
from functools import cache

import torch

from cpcompile import config
from cpcompile.logs import warn_once

MAX_TEMPLATE_DIM = 256
_FLASH_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_MAX_FLASH_DIM = {"cpu": None, "cuda": 256}


class StepKernel(Enum):
    """What computes the steps of one attention call; all have the same contract."""

    TEMPLATE = "triton"  # the templates in cpcompile/kernels/templates
    FLASH = "aten_flash"  # the vendor's: aten's flash attention of the device
    MATH = "aten_math"  # matrix products that hold all scores of a block


def step_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, value_dim: int
) -> StepKernel:
    """The kernel for tensors like these; `config.step_kernel` may name another one.

    On a GPU what the templates cannot do gets another kernel and one warning.
    """
    wanted = None if config.step_kernel == "auto" else StepKernel(config.step_kernel)
    dim = max(head_dim, value_dim)
    problem = why_no_template(dtype, dim)
    use_template = wanted is StepKernel.TEMPLATE or (
        wanted is None and device_type == "cuda"
    )
    if use_template and problem is None:
        return StepKernel.TEMPLATE
    kernel = wanted
    if wanted in (None, StepKernel.TEMPLATE):
        kernel = StepKernel.FLASH
    if kernel is StepKernel.FLASH and not has_flash(device_type, dtype, dim):
        kernel = StepKernel.MATH
    assert kernel is not None
    if use_template or (wanted is not None and kernel is not wanted):
        missing = problem or f"no flash kernel on {device_type}"
        warn_once(
            f"attention in {_name(dtype)} with head dim {dim} runs on {kernel.value}: "
            f"{missing}"
        )
    return kernel


def why_no_template(dtype: torch.dtype, dim: int) -> str | None:
    """What stands against our Triton kernels for this call, in words for the user."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return (
            f"the Triton kernels take bfloat16, float16 and float32, not {_name(dtype)}"
        )
    if dim > MAX_TEMPLATE_DIM:
        return f"the Triton kernels take head dims up to {MAX_TEMPLATE_DIM}, not {dim}"
    if not _has_triton():
        return "triton is not installed (pip install triton)"
    return None


def has_flash(device_type: str, dtype: torch.dtype, dim: int) -> bool:
    """Whether aten has flash attention for tensors like these."""
    limit = _MAX_FLASH_DIM.get(device_type)
    fits = limit is None or dim <= limit
    return dtype in _FLASH_DTYPES.get(device_type, ()) and fits


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
