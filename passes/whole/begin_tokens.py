"""Share out the tokens of values in which they begin, where no input has them.

    patches = flatten(conv(image, weight), 2)                  [B, C, 196]
      ->
    patches = cp_whole.split_along(patches, BEGUN, 2)

Attention would share them out, but every rank would compute all that lies between.
The gradient stays cut: what makes the tokens reads that of a rank's own, and gradients
of parameters are added up over the ranks. If rows are too few, all ranks get all of it.
Attention over tokens that is none of ours is refused then (refuse_attention).
"""

from __future__ import annotations

import functools
import operator

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.ops.shared_mixers import ALL, BEGUN, SPLIT_ALONG

from ..graph.context import Context
from ..graph.cp_attention import is_cp_attention
from ..graph.graph_pass import graph_pass
from ..graph.mixer_calls import is_mixer
from ..graph.nodes import all_nodes, fake_mode_of, fake_value, insert_call, module_path
from ..graph.sequence_tokens import constraint
from ..model.tokens.dim_flows import token_operands
from ..model.tokens.sequence_dims import SequenceDims
from ..placement.token_moves import are_few
from .refuse_attention import refuse_attention


@graph_pass(reads=("calls",), writes=("token_origins",))
def begin_tokens(graph: fx.Graph, ctx: Context) -> int:
    """Insert the splits; return how many. Raises: RewriteError, if strict."""
    operands = [
        pair
        for x in all_nodes(graph)
        if is_cp_attention(x) or is_mixer(x) or x.target is constraint
        for pair in token_operands(x)
    ]
    tokens = SequenceDims(graph, operands, fake_mode_of(graph), ctx.mesh, ctx.axis)
    begins = [x for x in all_nodes(graph) if x in tokens.begins]
    for node in begins:
        dim, value = tokens.of(node), fake_value(node)
        is_activation = isinstance(value, Tensor) and value.is_floating_point()
        if dim is None or dim.outer > 1 or not is_activation:
            continue
        how = (node, BEGUN if _has_rows(node, dim.dim, ctx.ranks) else ALL, dim.dim)
        with node.graph.inserting_after(node):
            split = insert_call(node.graph, SPLIT_ALONG, how, like=node, value=value)
        is_other = functools.partial(operator.is_not, split)
        node.replace_all_uses_with(split, delete_user_cb=is_other)
        shape = [expected(n) for n in value.shape]
        ctx.findings.token_origins.append(f"{module_path(node)} {node.name} {shape}")
    refuse_attention(graph, ctx)
    return len(ctx.findings.token_origins)


def _has_rows(node: fx.Node, dim: int, ranks: int) -> bool:
    """Tell whether ranks can have the rows, some each, of what `node` flattens."""
    tokens = fake_value(node)
    rows = fake_value(node.all_input_nodes[0]) if node.all_input_nodes else None
    if not isinstance(rows, Tensor) or rows.numel() != tokens.numel():
        return True
    return rows.shape[:dim] != tokens.shape[:dim] or not are_few(rows.shape[dim], ranks)
