"""Mend calls for which DTensor has a handler of its own (torch 2.13).

argmax and argmin: the handler reads offsets from small tensors, which have no values
under a fake mode, and refuses dimensions that are a flattened batch and sequence. While
tracing, the sharding rule is enough.

Convolutions: the handler exchanges the borders of images that are cut along the width,
and takes everything else as it lies on this rank: of a sharded sequence, one part is
convolved and labelled as the whole. While Dynamo traces only shapes matter, and those
are of the global tensors; what is gathered is decided later, by `localise`. The handler
of their backward brings the gradient to the placement of the input. Of a batch that is
flattened with the tokens, the redistributed gradient reads its placement in another way
(`use_strided_shard_as_shard_order`), so that the rule wants both tensors whole; the
handler does not gather them, and the sum over some images is labelled as that of all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor, Replicate

# Private, seen in torch 2.13.
from torch.distributed.tensor._nonlinear_redux import _get_output_sharding
from torch.utils import _pytree as pytree

from cpcompile.torch_patches.tracing import dynamo_traces

aten = torch.ops.aten
_Handler = Callable[[Any, Any, Any], Any]


@functools.cache
def install() -> None:
    """Go past the handlers while calls are traced; prepare what one is given."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for call, traced in (
        (aten.argmax.default, _by_rule),
        (aten.argmin.default, _by_rule),
        (aten.convolution.default, _of_whole),
        (aten.convolution_backward.default, _placed_as_input),
    ):
        if call in handlers:
            handlers[call] = traced(handlers[call])


def _by_rule(handler: _Handler) -> _Handler:
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


def _of_whole(handler: _Handler) -> _Handler:
    @functools.wraps(handler)
    def call(op: Any, args: Any, kwargs: Any) -> Any:
        if not dynamo_traces():
            return handler(op, args, kwargs)
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        args, kwargs = pytree.tree_map_only(DTensor, _of_global_shape, (args, kwargs))
        everywhere = (Replicate(),) * mesh.ndim
        return DTensor.from_local(
            op(*args, **kwargs), mesh, everywhere, run_check=False
        )

    return call


def _placed_as_input(handler: _Handler) -> _Handler:
    @functools.wraps(handler)
    def call(op: Any, args: Any, kwargs: Any) -> Any:
        gradient, x, *rest = args
        gradient = gradient.redistribute(x.device_mesh, x.placements)
        meta = gradient._spec.tensor_meta
        spec = dataclasses.replace(x._spec, tensor_meta=meta)
        gradient = DTensor._op_dispatcher.wrap(gradient._local_tensor, spec)
        return handler(op, (gradient, x, *rest), kwargs)

    return call


def _of_global_shape(x: DTensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
