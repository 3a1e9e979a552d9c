"""Make true what attention kernels rely on in the memory of their operands.

Note [What kernels rely on]
Operators promise results for tensors of any strides, kernels do not keep that promise:
a kernel that relies on an order in memory reads other elements in another one, and says
nothing. A caller cannot know the order either. Inductor chooses it, and it may be
another one than the fake tensors had: for an operator that a pass of ours inserted
Inductor keeps no strides at all. So each operand is brought into order where its kernel
is called, and nowhere else:

    kernel                         relies on                               else
    aten flash on CPU              dense rows of q, k, v                   wrong
        its backward               dense rows of q, k, v, out              wrong
    aten flash on CUDA             dense rows of q, k, v                   raises
                                   rows of q, k, v at multiples of 16 B    raises
        its backward               a contiguous lse                        wrong
    our Triton templates           dense rows of every operand             wrong
    messages between ranks         contiguous tensors                      raises

Rows are dense if the last dimension has stride 1. aten's kernels read the other strides
of these operands, and all strides of grad, lse (on CPU) and the mask; on CUDA aten
copies grad and out itself. Seen in torch 2.13, where every order of every operand was
tried on CPU. Nothing was tried on CUDA: what it says of lse is read in
attention_backward.cu, and the alignment is a precaution that no source was found for.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16  # a precaution, see above


def dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy, with stride 1 in the last dimension; of any ndim."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def flash_operand(x: Tensor) -> Tensor:
    """Return x, or a copy, as aten's flash kernels need q, k, v, out and grad."""
    x = dense_rows(x)
    if x.device.type == "cpu" or _has_aligned_rows(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _has_aligned_rows(x: Tensor) -> bool:
    """Tell whether all rows begin at multiples of 16 bytes, if the memory does."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    starts = (x.storage_offset(), *steps)
    return all(n * x.element_size() % _ALIGNMENT_BYTES == 0 for n in starts)
