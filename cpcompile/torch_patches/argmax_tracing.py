"""Lets torch.argmax and torch.argmin of DTensors be traced.

DTensor has a handler of its own for these two (torch 2.13), which reads offsets from
small tensors: under a fake mode they have no values. It also refuses dimensions that
are a flattened batch and sequence. While tracing, its sharding rule is enough.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor, Replicate

# Private, seen in torch 2.13.
from torch.distributed.tensor._nonlinear_redux import _get_output_sharding

aten = torch.ops.aten


@functools.cache
def install() -> None:
    """Use the rule while tracing."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for call in (aten.argmax.default, aten.argmin.default):
        if call in handlers:
            handlers[call] = _traceable(handlers[call])


def _traceable(handler: Any) -> Any:
    @functools.wraps(handler)
    def call(op: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        if detect_fake_mode(x._local_tensor) is None:
            return handler(op, args, kwargs)
        dim = rest[0] if rest else kwargs.get("dim")
        reduced = range(x.ndim) if dim is None else [dim % max(x.ndim, 1)]
        whole = tuple(
            Replicate() if p.is_partial() or getattr(p, "dim", None) in reduced else p
            for p in x.placements
        )
        x = x.redistribute(placements=whole)
        spec = _get_output_sharding(op, (x, *rest), kwargs).output_spec
        local = op(x._local_tensor, *rest, **kwargs)
        return DTensor._op_dispatcher.wrap(local, spec)

    return call
