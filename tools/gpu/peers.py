"""Other attention kernels on the same operands: flash, cuDNN and FlexAttention.

All are used as their documentation has it: SDPA with the backend picked by
torch.nn.attention.sdpa_kernel, and torch.compile(flex_attention) without options,
causal by a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tools.gpu.sections import Mode

VENDORS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
PEERS = (*VENDORS, "flex")

Forward = Callable[[], Tensor]
Operands = tuple[Tensor, Tensor, Tensor]


def vendor_forwards(qkv: Operands, causal: bool) -> dict[str, Forward]:
    """Make SDPA calls by each vendor's backend; one raises where it cannot do it."""

    def call(backend: SDPBackend) -> Forward:
        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*qkv, is_causal=causal)

        return forward

    return {name: call(backend) for name, backend in VENDORS.items()}


def flex_forward(qkv: Operands, causal: bool, mode: Mode) -> Forward:
    """Make a call of FlexAttention, compiled for these shapes when first called."""
    q, k, _ = qkv
    mask = None
    if causal:
        sizes = q.shape[2], k.shape[2]
        mask = create_block_mask(
            lambda b, h, row, key: row >= key, None, None, *sizes, device=mode.device
        )
    # Else torch counts all shapes as recompilations of one function, and at the limit
    # silently runs it uncompiled.
    torch._dynamo.reset()
    # Buffers that a backward may overwrite would not let it run twice.
    functorch_config.donated_buffer = False
    compiled = flex_attention
    if not mode.smoke:  # on a CPU there is no backward, and C++ would be compiled
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    return lambda: compiled(*qkv, block_mask=mask)


def backwards(
    forwards: Mapping[str, Forward], qkv: Operands, grad: Tensor
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return the backward of each forward that works, and why the others do not."""
    functions: dict[str, Callable[[], object]] = {}
    errors: dict[str, str] = {}

    def call(out: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True)

    for name, forward in forwards.items():
        try:
            functions[name] = call(forward())
        except Exception as error:  # that peer cannot do it; the others can
            errors[name] = f"{type(error).__name__}: {error}"[:500]
    return functions, errors
