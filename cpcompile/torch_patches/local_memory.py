"""Fix calls on DTensors whose local part lies in another order than the whole.

DTensor works out the strides of a result from the global strides of the operands, and
the local result follows the local ones. The two orders differ after a redistribution,
which may make the part contiguous, where a size is 1 on this rank, and where the meta
function of a call orders its result as the kernel does not. Two kinds of calls go by
the global strides (seen in torch 2.13 and 2.15):

Autograd asks the global strides whether a gradient can be viewed in the shape of the
operand; then the local part cannot:

    grad  [64, 2, 48]  global strides (96, 48, 1), local part (48, 1536, 1)
    aten.view(grad, [128, 48])  ->  ValueError: cannot view

Autograd makes an operand contiguous for kernels that read memory as if it were, and
nothing is copied where the whole is said to be: the kernel reads other numbers.

The meta function of the backward of group norm (torch 2.13 and 2.14) says that its
result lies as the gradient does, and kernels return a contiguous one: a view that is
traced then fails when it runs. So its operands are contiguous, the whole ones too.

While a graph is compiled such a part is copied first. Nobody can tell that from a view
there: writes through views are functional by then, and Dynamo looks at shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cpcompile.torch_private.distributed import by_dtensor

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
CONTIGUOUS_ONLY = (  # test_local_memory.py looks for them in all of aten
    aten._linalg_det.default,  # the backward looks at strides for what was factorized
    aten._linalg_slogdet.default,
    aten._pdist_forward.default,
    aten._pdist_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten.native_group_norm.default,
    aten.nll_loss2d_backward.default,
)
"""Kernels that fail on, or misread, an operand that is not contiguous."""
MISTRACED = (aten.native_group_norm_backward.default,)
"""Such kernels whose results lie as traced only if operands are contiguous."""


@contextmanager
def copied_if_need_be() -> Iterator[None]:
    """Copy local parts into the order that a call expects, inside; may be nested."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    ours = dict.fromkeys(VIEWS, _view) | dict.fromkeys(CONTIGUOUS_ONLY, _in_order)
    ours |= dict.fromkeys(MISTRACED, _contiguous)
    added = {op: handler for op, handler in ours.items() if op not in handlers}
    handlers |= added
    try:
        yield
    finally:
        for op in added:
            del handlers[op]


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return by_dtensor(op, args, kwargs)
    except (RuntimeError, ValueError):  # of a real tensor, of a fake one
        x, *rest = args
        if not isinstance(x, DTensor) or _lies_as_said(x):
            raise
        return by_dtensor(op, (_as_said(x), *rest), kwargs)


def _in_order(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(DTensor, _as_said, (args, kwargs))
    return by_dtensor(op, args, kwargs)


def _contiguous(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def contiguous(x: DTensor) -> Any:
        return _as_said(x).contiguous()

    args, kwargs = pytree.tree_map_only(DTensor, contiguous, (args, kwargs))
    return by_dtensor(op, args, kwargs)


def _lies_as_said(x: DTensor) -> bool:
    return x._local_tensor.permute(_order(x)).is_contiguous()


def _as_said(x: DTensor) -> DTensor:
    """Return x with a local part in the order of memory that its own strides tell."""
    if _lies_as_said(x):
        return x
    order = _order(x)
    back = [order.index(dim) for dim in range(x.ndim)]
    return DTensor.from_local(
        x._local_tensor.permute(order).contiguous().permute(back),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


def _order(x: DTensor) -> list[int]:
    """Return the dimensions of x, the one with the largest global stride first."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dim: strides[dim], reverse=True)
