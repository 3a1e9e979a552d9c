"""Keep nn.TransformerEncoder and TransformerDecoder in the graph of their model.

With is_causal=None, their default, they compare the mask with a causal one. Dynamo
breaks the graph at the answer, which is data; and as it compiles no function of
torch.nn on its own, the whole encoder runs in eager. The answer only chooses a kernel:
without it the mask itself is used, which says the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.modules import transformer


@functools.cache
def install() -> None:
    """Let Dynamo not trace the comparison; eager makes it as before."""
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:  # another torch: the break is a warning
        return
    torch.compiler.substitute_in_graph(original)(_detect_is_causal_mask)


def _detect_is_causal_mask(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Return what the caller says in `is_causal`, and False where it says nothing."""
    return is_causal is True
