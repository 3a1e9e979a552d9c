"""cp::expert_numbers: what sorts tokens by expert, if no number is negative.

    experts = table[ids]                    looked up, so that only data tells
    numbers = cp::expert_numbers(experts, ...)
    sort(numbers)

Rows with negative numbers come first when they are sorted, and nobody counts them as
rows of an expert: all others would be taken for those of another expert, and a rank
with some of the tokens would take other rows for them than one process.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("cp::expert_numbers", mutates_args=())
def expert_numbers(numbers: Tensor, where: str) -> Tensor:
    """Return a contiguous copy of the numbers of experts.

    Args:
        numbers: int, of any shape.
        where: the line of the program, for the message.

    Raises: RuntimeError if one is negative; on a GPU a device-side assertion with the
        same text.
    """
    message = f"{where}: tokens are sorted by expert, and the number of one is negative"
    right = (numbers >= 0).all()
    if not numbers.is_cpu:
        torch._assert_async(right, message)
    elif not right:
        raise RuntimeError(message)
    return numbers.clone(memory_format=torch.contiguous_format)


@expert_numbers.register_fake
def _(numbers: Tensor, where: str) -> Tensor:
    return numbers.new_empty(numbers.shape)
