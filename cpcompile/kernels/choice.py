"""The choice of a ring step's kernel: ours, aten's flash attention, or plain math."""

from __future__ import annotations

import importlib.util
from enum import Enum
from functools import cache

import torch

from cpcompile.logs import warn_once
from cpcompile.settings import setting

MAX_TEMPLATE_DIM = 256
_TEMPLATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLASH_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_MAX_FLASH_DIM = {"cpu": None, "cuda": 256}


class StepKernel(Enum):
    """The kernels for the steps of one attention call; all have the same contract."""

    TEMPLATE = "triton"  # the templates in cpcompile/kernels/templates
    FLASH = "aten_flash"  # the vendor's: aten's flash attention of the device
    MATH = "aten_math"  # matrix products that hold all scores of a block


def step_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, value_dim: int
) -> StepKernel:
    """Choose the kernel for tensors like these; `config.step_kernel` may name another.

    On a GPU what the templates cannot do gets another kernel and one warning.
    """
    dim = max(head_dim, value_dim)
    usual = StepKernel.TEMPLATE if device_type == "cuda" else StepKernel.FLASH
    name = setting("step_kernel")
    named = name is not None
    wanted = StepKernel(name) if named else usual
    if wanted is StepKernel.MATH:
        return wanted
    no_flash = why_no_flash(device_type, dtype, dim)
    if wanted is StepKernel.TEMPLATE:
        problem = why_no_template(dtype, dim)
    else:
        problem = no_flash
    if problem is None:
        return wanted
    kernel = StepKernel.MATH
    if wanted is StepKernel.TEMPLATE and no_flash is None:
        kernel = StepKernel.FLASH
    if named or wanted is StepKernel.TEMPLATE:  # math is usual on a CPU for float64
        warn_once(
            f"attention in {_name(dtype)} with head dim {dim} runs on {kernel.value}: "
            f"{problem}"
        )
    return kernel


def masked_step_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    bias: torch.dtype | None,
    changes: bool = False,
    table: bool = False,
) -> StepKernel:
    """Choose the kernel under a mask: FLASH or MATH by blocks, or TEMPLATE.

    bias: its dtype. A bias of more digits than q has keeps them in plain math only.
    changes: whether there is a softcap or dropout, which aten's flash kernels lack.
    table: whether the bias is one of positions, which the templates read in float32;
        one of pairs is for matrix products.
    """
    kernel = step_kernel(device_type, dtype, head_dim, value_dim)
    if kernel is StepKernel.FLASH:
        if changes:
            return StepKernel.MATH
        same = bias in (None, torch.bool, dtype)
        return kernel if device_type == "cpu" and same else StepKernel.MATH
    if bias is None or (table and bias in _TEMPLATE_DTYPES):
        return kernel
    return StepKernel.MATH


def why_no_template(dtype: torch.dtype, dim: int) -> str | None:
    """Say why our Triton kernels cannot run this call, in words for the user."""
    if dtype not in _TEMPLATE_DTYPES:
        return (
            f"the Triton kernels take bfloat16, float16 and float32, not {_name(dtype)}"
        )
    if dim > MAX_TEMPLATE_DIM:
        return f"the Triton kernels take head dims up to {MAX_TEMPLATE_DIM}, not {dim}"
    if not _has_triton():
        return "triton is not installed (pip install triton)"
    return None


def why_no_flash(device_type: str, dtype: torch.dtype, dim: int) -> str | None:
    """Say why aten's flash attention cannot run this call, in words."""
    if dtype not in _FLASH_DTYPES.get(device_type, ()):
        return f"aten has no flash attention for {_name(dtype)} on {device_type}"
    limit = _MAX_FLASH_DIM[device_type]
    if limit is not None and dim > limit:
        return f"aten's flash attention takes head dims up to {limit}, not {dim}"
    return None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
