"""DTensor's rules of `ops.unflattened_linear`: rows, columns, and sums of parts."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from cpcompile.ops.unflattened_linear import LINEAR, WEIGHT_GRADIENT

WHOLE = Replicate()


def register() -> None:
    """Register the rules; called once, when cpcompile.ops is imported."""
    register_sharding(LINEAR)(_linear)
    register_sharding(WEIGHT_GRADIENT)(_weight_gradient)


def _linear(x: Any, weight: Any) -> list[Any]:
    inner = x.ndim - 1
    return [
        ([WHOLE], [WHOLE, WHOLE]),
        *(([Shard(d)], [Shard(d), WHOLE]) for d in range(inner)),
        ([Shard(inner)], [WHOLE, Shard(1)]),
        ([Partial()], [Shard(inner), Shard(0)]),
        ([Partial()], [Partial(), WHOLE]),
    ]


def _weight_gradient(grad: Any, x: Any) -> list[Any]:
    inner = x.ndim - 1
    return [
        ([WHOLE], [WHOLE, WHOLE]),
        *(([Partial()], [Shard(d), Shard(d)]) for d in range(inner)),
        ([Shard(0)], [Shard(inner), WHOLE]),
        ([Shard(1)], [WHOLE, Shard(inner)]),
    ]
