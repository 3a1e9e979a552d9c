"""Make a graph of P tokens right where only the first S of them are real.

where: l_tokens_ [2, P], l_labels_ [2, P], cp_real_length = S
loss = cross_entropy(view, l_labels_)
  ->
arange = arange(P); lt = lt(arange, cp_real_length)
where = where(lt, l_labels_, -100)
loss = cross_entropy(view, where)
"""

from __future__ import annotations

import torch.fx as fx

from cpcompile.geometry.lengths import LengthNotSymbolic

from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from .padded_graph import PaddedGraph
from .sizes import Unproved
from .token_reader import Reader


@graph_pass(
    reads=("calls",),
    writes=(
        "masks",
        "padded_results",
    ),
)
def pad_tokens(graph: fx.Graph, ctx: Context) -> int:
    """Hide the padding, see Note [Padded lengths]; returns the number of places.

    Raises: LengthNotSymbolic, if a call may read the padding.
    """
    if ctx.padding is None:
        return 0
    padded = PaddedGraph(graph, ctx, ctx.padding)
    try:
        ctx.findings.padded_results = Reader(padded).read()
    except Unproved as problem:
        raise LengthNotSymbolic(f"it cannot be padded: {problem}") from problem
    return padded.fixes
