"""The kernel for the steps of an attention call, chosen by its tensors and its spec.

Legend as in block_attention.py. What each kernel can do is in kernels/choice.py.
"""

from __future__ import annotations

from torch import Tensor

from cpcompile.kernels.choice import StepKernel, masked_step_kernel, step_kernel
from cpcompile.ops.attention_spec import AttentionInputs


def call_kernel(
    q_BHRD: Tensor,
    v_BGKE: Tensor,
    inputs: AttentionInputs,
    bias_grad: bool = False,
    grad_lse_BHR: Tensor | None = None,
) -> StepKernel:
    """Choose the kernel for the steps of a call, under a mask or without one.

    bias_grad, grad_lse_BHR: of a backward; flash needs room for the column.
    """
    if inputs.has_modifiers:
        return kernel_of_masked(q_BHRD, v_BGKE, inputs, bias_grad)
    operand = (q_BHRD.device.type, q_BHRD.dtype, q_BHRD.shape[-1])
    kernel = step_kernel(*operand, v_BGKE.shape[-1])
    if kernel is StepKernel.FLASH and grad_lse_BHR is not None:
        kernel = step_kernel(*operand, v_BGKE.shape[-1] + 1)
    return kernel


def kernel_of_masked(
    q_BHRD: Tensor, v_BGKE: Tensor, inputs: AttentionInputs, bias_grad: bool = False
) -> StepKernel:
    """Choose the kernel of MaskedRows; bias_grad: of a backward."""
    bias = None if inputs.inlined(bias_grad) else inputs.bias
    changes, table = inputs.spec.changes_scores, inputs.has_table
    return masked_kernel(q_BHRD, v_BGKE, bias, changes, table)


def masked_kernel(
    q_BHRD: Tensor,
    v_BGKE: Tensor,
    bias: Tensor | None,
    changes: bool = False,
    table: bool = False,
) -> StepKernel:
    """Choose the kernel for such a call, see masked_step_kernel.

    changes, table: changes_scores and has_table of the inputs.
    """
    return masked_step_kernel(
        q_BHRD.device.type,
        q_BHRD.dtype,
        q_BHRD.shape[-1],
        v_BGKE.shape[-1],
        None if bias is None else bias.dtype,
        changes,
        table,
    )
