"""Make a graph of P tokens right where only the first S of them are real.

    loss = cross_entropy(view, l_labels_)           # [2, P]; cp_real_length = S
      ->
    arange = arange(P); lt = lt(arange, cp_real_length)
    where = where(lt, l_labels_, -100)
    loss = cross_entropy(view, where)

See Note [Padded lengths]. token_reader.py follows the tokens from inputs to results,
and has the rules of calls that a flow does not prove. What is refused (a convolution
with a stride, a sort over tokens, products of all pairs, floats computed of the number
of tokens) is logged, and the graph is compiled for its length alone; so it is where an
input is a DTensor.
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
