"""What a rank does of a call that is a composition of others, forward and backward.

    out, lse, saved = cp_whole.ulysses_attention(q, k, v, ...)
      ->
    q1, k1, v1 = cp.ulysses_scatter([q, k, v], ...)
    out1, lse1 = aten._scaled_dot_product_flash_attention_for_cpu(q1, k1, v1)
    out        = cp.ulysses_gather([out1], ...)        saved: [q1, k1, v1, out1, lse1]

Autograd runs the composition on DTensors. What it saves are further results of the
forward, and the backward is its gradient of these: so nothing is exchanged again, and
nothing is said here of what a composition is made of.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Whether hooks of saved tensors are left out, as while Dynamo compiles; seen in 2.13.
from torch._C._autograd import _saved_tensors_hooks_set_tracing as _set_tracing
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

import cpcompile.ops  # noqa: F401  (registers the operators)
from cpcompile.ops.dtensor.dtensor_rules import as_dtensors
from cpcompile.ops.dtensor.whole_composite import composition_of
from cpcompile.torch_private.operators import OpOverload

COMPOSITIONS = tuple(map(composition_of, ("ulysses_attention", "hybrid_attention")))


def composition_rules() -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call."""
    forward = {x.forward: functools.partial(_forward, x.call) for x in COMPOSITIONS}
    return forward | {
        x.backward: functools.partial(gradient_of_calls, x.call) for x in COMPOSITIONS
    }


def _forward(
    call: OpOverload, q: Any, k: Any, v: Any, extras: Sequence[Any], *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    saved: list[Tensor] = []

    def keep(x: Tensor) -> None:
        saved.append(x.detach())

    operands = map(_learning, (q, k, v))
    with torch.enable_grad(), _saving(keep, _never):
        out, lse = call(*operands, extras, *rest)
    return out.detach(), lse.detach(), saved


def gradient_of_calls(
    call: OpOverload,
    grad: Any,
    grad_lse: Any,
    saved: list[Tensor],
    needed: Sequence[bool],
    q: Any,
    k: Any,
    v: Any,
    extras: Sequence[Any],
    *rest: Any,
) -> tuple[Any, ...]:
    places = itertools.count()

    def number(_: Tensor) -> int:
        return next(places)

    # What the forward computes is in the graph already; only its gradient is written.
    with torch.enable_grad(), disable_proxy_modes_tracing():
        operands = [_learning(x) for x in (q, k, v)]
        own = [
            _learning(x) if need else x for x, need in zip(extras, needed, strict=True)
        ]
        with _saving(number, saved.__getitem__):
            results = call(*operands, own, *rest)
    assert next(places) == len(saved), "a composition saves the same every time"
    pairs = zip(results, (grad, grad_lse), strict=True)
    outs, grads = zip(*[(x, g) for x, g in pairs if g is not None], strict=True)
    learns = [x for x, need in zip(own, needed, strict=True) if need]
    given = as_dtensors(grads, outs[0].device_mesh)
    dq, dk, dv, *more = torch.autograd.grad(outs, [*operands, *learns], given)
    return dq, dk, dv, more


@contextmanager
def _saving(
    keep: Callable[[Tensor], Any], given: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Have autograd call these for what it saves, also while Dynamo compiles."""
    before = _set_tracing(False)
    try:
        with saved_tensors_hooks(keep, given):
            yield
    finally:
        _set_tracing(before)


def _learning(x: Any) -> Tensor:
    """Return x as a leaf that gets a gradient."""
    if isinstance(x, DTensor):
        return DTensor(x._local_tensor, x._spec, requires_grad=True)
    return x.detach().requires_grad_()  # type: ignore[no-any-return]


def _never(_: Any) -> Tensor:
    raise AssertionError("the gradient of a forward is another call")
