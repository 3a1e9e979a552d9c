"""Has DTensor know the dimension of a cumulative sum that is counted from the end.

Its rule for scans (torch 2.13) compares the dimension with the sharded one as it is
given, so that x.cumsum(-2) of a tensor that is sharded there is computed on each part.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten
SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)


@functools.cache
def install() -> None:
    """Count dimensions from the front before DTensor's rule sees them."""
    rules: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    for scan in SCANS:
        if scan in rules:
            rules[scan] = _from_the_front(rules[scan])


def _from_the_front(rule: Any) -> Any:
    @functools.wraps(rule)
    def counted(schema: Any) -> Any:
        x, dim, *rest = schema.args_schema
        args = (x, dim % max(x.ndim, 1), *rest)
        return rule(type(schema)(schema.op, args, schema.kwargs_schema))

    return counted
