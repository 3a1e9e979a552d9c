"""Views of DTensors whose local part lies in another order than the whole.

DTensor works out the strides of a result from the global strides of the operands, and
the local result follows the local ones. The two orders differ after a redistribution,
which may make the part contiguous, and where a size is 1 on this rank. Autograd asks
the global strides whether a gradient can be viewed in the shape of the operand; then
the local part cannot (seen in torch 2.13 and 2.15):

    grad  [64, 2, 48]  global strides (96, 48, 1), local part (48, 1536, 1)
    aten.view(grad, [128, 48])  ->  ValueError: cannot view

While a graph is compiled such a part is copied first. Nobody can tell that from a view
there: writes through views are functional by then, and Dynamo looks at shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@contextmanager
def copied_if_need_be() -> Iterator[None]:
    """Views of DTensors copy a local part that is not viewable; may be nested."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    added = [view for view in VIEWS if view not in handlers]
    handlers |= dict.fromkeys(added, _view)
    try:
        yield
    finally:
        for view in added:
            del handlers[view]


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)  # what follows is DTensor's own
    try:
        return op(*args, **kwargs)
    except (RuntimeError, ValueError):  # of a real tensor, of a fake one
        x, *rest = args
        if not isinstance(x, DTensor) or x._local_tensor.is_contiguous():
            raise
        return op(_contiguous_part(x), *rest, **kwargs)
    finally:
        handlers[op] = handler


def _contiguous_part(x: DTensor) -> DTensor:
    """x with a local part in the order of its dimensions; its own strides stay."""
    return DTensor.from_local(
        x._local_tensor.contiguous(),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )
