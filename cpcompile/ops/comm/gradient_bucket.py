"""cp::gradient_bucket: many gradients as one vector, in one call.

Inductor makes a kernel of a concatenation, with an operand and a loop for each tensor:
at 48 layers g++ took half of its time for those. Where it can let each gradient be
computed in its place in the vector, that saves the copies; a function of repeated
blocks returns memory of its own, so that there is nothing to save.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("cp::gradient_bucket", mutates_args=())
def gradient_bucket(gradients: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all gradients, one tensor after another.

    Args:
        gradients: one or more, of one dtype and device, any shapes.

    Returns: a new vector.

    Raises: torch's error for no gradients.
    """
    result = gradients[0].new_empty(sum(x.numel() for x in gradients))
    return torch.cat([x.reshape(-1) for x in gradients], out=result)


@gradient_bucket.register_fake
def _(gradients: Sequence[Tensor]) -> Tensor:
    return gradients[0].new_empty(sum(x.numel() for x in gradients))
