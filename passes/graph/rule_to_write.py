"""The line by which users tell DTensor of a custom operator that keeps tokens apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cpcompile.torch_private.operators import OpOverload

_WITH_RULES = ("aten", "prims", "cp", "cp_whole", "_c10d_functional", "_dtensor")


def rule_to_write(
    call: object, at: str, given: tuple[Any, ...], named: Mapping[str, Any], result: Any
) -> str:
    """Return what to add to a warning of a call; "" if the operator is not the user's.

    given, named: the values of its arguments. at: where it stands.
    """
    if not isinstance(call, OpOverload) or call.namespace in _WITH_RULES:
        return ""
    if not isinstance(result, Tensor) or result.ndim < 2:
        return ""
    names = [x.name for x in call._schema.arguments]
    operands = dict(zip(names, given, strict=False)) | dict(named)
    shards = [_placement(operands.get(x), result) for x in names]
    return (
        f"; or, if {call} at {at} computes every token by itself, say so "
        "before the first call, by torch.distributed.tensor.experimental: "
        f"register_sharding(torch.ops.{call})(lambda {', '.join(names)}: "
        f"[([Shard(1)], [{', '.join(shards)}])])"
    )


def _placement(operand: object, result: Tensor) -> str:
    if not isinstance(operand, Tensor):
        return "None"
    return "Shard(1)" if operand.shape[:2] == result.shape[:2] else "Replicate()"
