"""Run row-wise calls on the rows of each rank where DTensor would gather.

    topk = topk(probabilities, 2)               # [74, 4] _S(0, 2) -> [74, 2] R
      ->
    topk = cp_row_parallel(topk, probabilities) # [74, 4] _S(0, 2) -> [74, 2] _S(0, 2)

Many of DTensor's rules do not take batch and sequence flattened into one dimension,
though they take a dimension that is split evenly. Such a rule is the proof that rows do
not meet, and the call runs on the rows of a rank.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected, is_same
from cpcompile.torch_private import pytree

from ...flow.rows import keeps_rows
from ...graph.dispatch_calls import NotByRows, tensors_read
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.graph_values import GraphValues
from ..moe.region_module import one_call
from ..moe.token_program import RowProgram, cp_row_parallel


def row_parallel(
    known: GraphValues, node: fx.Node, result: Any
) -> tuple[NewCall, Any] | None:
    """Make a call on the rows of each rank, with its result; None if impossible.

    result: what DTensor makes of the call, None if nothing. A call whose result is
        split is left as it is.
    """
    values = {x: known.values[x] for x in tensors_read(node)}
    dtensors = {x: value for x, value in values.items() if isinstance(value, DTensor)}
    if known.joint_of(node) is not None:
        return None
    cut = {x for x, value in dtensors.items() if _is_cut(value, known.ctx.axis)}
    results = pytree.tree_leaves(fake_value(node))
    if not cut or len(dtensors) != len(values) or _is_split(result):
        return None
    if not all(isinstance(x, Tensor) and x.ndim for x in results):
        return None
    (tokens, *other_sizes) = (values[x].shape[0] for x in cut)
    if not tokens:
        return None
    if any(
        not is_same(n, tokens) for n in (*other_sizes, *(x.shape[0] for x in results))
    ):
        return None  # asked for all ranks alike: nothing is wrong with an empty part
    if not keeps_rows(known.flows, node, cut, expected(tokens)):
        return None
    has_rows = {x: x in cut for x in dtensors}
    name = getattr(known.callable(node), "__name__", "call")
    try:
        module = one_call(node, has_rows)
    except NotByRows:
        return None
    of_rows = (True,) * len(results)
    program = RowProgram(module, name, tuple(has_rows.values()), of_rows)
    fake_result, problem = known.trial.run(
        cp_row_parallel, (program, *values.values()), {}
    )
    call = NewCall(cp_row_parallel, (program, *dtensors))
    return None if problem is not None else (call, fake_result)


def _is_cut(value: DTensor, axis: int) -> bool:
    """Tell whether the axis splits the first dimension."""
    return getattr(value.placements[axis], "dim", None) == 0


def _is_split(result: Any) -> bool:
    return any(
        isinstance(x, DTensor) and not all(p.is_replicate() for p in x.placements)
        for x in pytree.tree_leaves(result)
    )
