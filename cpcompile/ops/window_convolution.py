"""Convolutions by their windows, whatever a model pads before and cuts after.

    convolution(pad(x), w)[.., :S]         ->  cp_whole.window_convolution(x, w, ..)
    convolution_backward(pad(dy), pad(x))  ->  cp_whole.window_convolution_backward

Result i of a dimension is that of the window which begins at i * stride - before. These
two stand in a graph of the whole sequence: `DECOMPOSED` says what they become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Ints = Sequence[int]


def window_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    before: Ints,
    counts: Ints,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """Convolve x [B, C, ..] with weight [N, C / groups, ..]; return [B, N, *counts].

    before: positions of zeros before the first one, less than 0 if that is skipped.
    counts: windows. Both per dimension of positions, as stride and dilation are.
    """
    given = _padded(x, weight, stride, before, counts, dilation)
    x, padding, _ = given
    result: Tensor = aten.convolution.default(
        *(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    )
    return result


def window_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    before: Ints,
    dilation: Ints,
    groups: int,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of x, weight and bias that are needed, else empty tensors.

    grad: [B, N, *counts]. Other arguments as of window_convolution.
    """
    counts = grad.shape[2:]
    wide, padding, pads = _padded(x, weight, stride, before, counts, dilation)
    grads = aten.convolution_backward.default(
        *(grad, wide, weight, [weight.shape[0]], stride, padding, dilation, False),
        *([0] * len(stride), groups, list(needed)),
    )
    of_x, *others = (grad.new_empty(0) if g is None else g for g in grads)
    if needed[0] and any(pads):
        of_x = aten.constant_pad_nd.default(of_x, [-n for n in pads])
    return [of_x, *others]


def _padded(
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    before: Ints,
    counts: Ints,
    dilation: Ints,
) -> tuple[Tensor, list[int], list[int]]:
    """Return what torch convolves, with which padding, and what was added to x."""
    padding, pads = [], list[int]()
    for size, taps, step, first, count, apart in zip(
        x.shape[2:], weight.shape[2:], stride, before, counts, dilation, strict=True
    ):
        reach = apart * (taps - 1) + 1
        as_is = first >= 0 and (size + 2 * first - reach) // step + 1 == count
        padding.append(first if as_is else 0)
        after = (count - 1) * step + reach - first - size
        pads = [0, 0, *pads] if as_is else [first, after, *pads]
    wide: Tensor = aten.constant_pad_nd.default(x, pads) if any(pads) else x
    return wide, padding, pads


_forward = torch.library.custom_op("cp_whole::window_convolution", mutates_args=())(
    window_convolution
)
_backward = torch.library.custom_op(
    "cp_whole::window_convolution_backward", mutates_args=()
)(window_convolution_backward)
_forward.register_fake(window_convolution)
_backward.register_fake(window_convolution_backward)

CONVOLUTION = torch.ops.cp_whole.window_convolution.default
CONVOLUTION_BACKWARD = torch.ops.cp_whole.window_convolution_backward.default
DECOMPOSED: dict[Any, Callable[..., Any]] = {
    CONVOLUTION: window_convolution,
    CONVOLUTION_BACKWARD: window_convolution_backward,
}
