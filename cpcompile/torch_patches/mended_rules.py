"""Mends rules of DTensor that give wrong results (torch 2.13).

Cumulative sums: the rule compares the dimension with the sharded one as it is given, so
that x.cumsum(-2) of a tensor that is sharded there is computed on each part.

topk, kthvalue and histc: answers are remembered without the number that these take, so
that x.topk(1) after x.topk(2) says that it has two columns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten
SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
COUNTED = (aten.topk.default, aten.kthvalue.default, aten.histc.default)


@functools.cache
def install() -> None:
    """Have DTensor see dimensions from the front, and remember all numbers."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = propagator.op_strategy_funcs
    for scan in SCANS:
        if scan in rules:
            rules[scan] = _from_the_front(rules[scan])
    for known in (
        propagator.op_to_schema_info,
        propagator.op_to_schema_info_for_single_dim_strategy,
    ):
        for op in COUNTED:
            if op in known:  # what is compared is the first argument, and all others
                known[op] = dataclasses.replace(known[op], static_argnum=1)


def _from_the_front(rule: Any) -> Any:
    @functools.wraps(rule)
    def counted(schema: Any) -> Any:
        x, dim, *rest = schema.args_schema
        args = (x, dim % max(x.ndim, 1), *rest)
        return rule(type(schema)(schema.op, args, schema.kwargs_schema))

    return counted
