"""Split products along tokens, which DTensor would gather, or have every rank compute.

e = linear(times, weight)     # times: [2, 60, 8], the same on every rank
  ->
cp_shard = cp_shard(times, 1)             # [2, 60, 8] S(1)
e = linear(cp_shard, weight)              # [2, 60, 4] S(1)
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.lengths import expected, is_divided, is_symbol
from cpcompile.torch_private.distributed import StridedShard

from ...flow.dim_maps import Labels
from ...flow.dim_rules import product_map
from ...graph.calls import canonical_call, spelled
from ...graph.new_call import NewCall, with_inputs
from ...placement.decisions import Propagate, Replace
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_replicate
from ...placement.token_products import cp_linear_of_parts, cp_token_products
from ..moves.move_rules import split_dim

_BATCHED = 3  # as many dimensions have products that are a batch


def token_products(known: GraphValues, node: fx.Node) -> Propagate | None:
    """Compute a product for every token on the tokens of a rank.

    The tokens are a dimension of the batch of both operands, or of one, and then the
    other is the same for all of them.
    """
    table = product_map(node)
    if table is None or len(table.operands) > 2:
        return None
    operands = [(known.value(x), labels) for x, labels in table.operands]
    labels = [_cut_label(known, x, own) for x, own in operands]
    if None in labels or len({*labels} - {""}) != 1:
        return None
    label = max(label for label in labels if label is not None)
    is_einsum = spelled(node) == "einsum"
    if label not in table.result or (label in ("m", "n") and not is_einsum):
        return None  # rows and columns are what DTensor splits
    dims = [_token_dim(x, own, label) for x, own in operands]
    if None not in dims or is_einsum:
        owners = [_owners(operands, x) for x in table.result]
        own = owners[table.result.index(label)]
        beside = [x for x, o in zip(table.result, owners, strict=True) if o == own]
        if not is_einsum:
            beside = beside[: beside.index(label) + 1]
        if beside == [label]:
            return None  # no other dimension is flattened together with the tokens
    equation = node.args[0] if is_einsum else None
    (lhs, _), (rhs, _) = table.operands
    args = (equation, lhs, rhs, (*dims, table.result.index(label)))
    return Propagate(NewCall(cp_token_products, args))


def linear(known: GraphValues, node: fx.Node) -> Replace | None:
    """Compute a linear layer on the rows of a grid that a rank has.

    x: [B, 9, 8, C] S(1) on 2 ranks. torch flattens all but the channels, of which
    DTensor has no placement for 5 and 4 rows of 8 tokens, or makes a batch of products
    of them, where a weight requires no gradient, and DTensor gathers them.
    """
    x = canonical_call(node).arguments["input"]
    dim, value = split_dim(known, x), known.value(x)
    of_grid = dim is not None and value.ndim > _BATCHED and 0 < dim < value.ndim - 1
    # DTensor has no placement for a symbolic number of rows of parts, either.
    of_rows = dim == 1 and is_symbol(value.shape[0])
    if of_grid or of_rows or _is_batch_of_parts(known, value):
        return linear_of_parts(known, node)
    return None


def linear_of_parts(known: GraphValues, node: fx.Node) -> Replace | None:
    """Compute a linear layer of a rank's part, whatever dimension but channels is cut.

    DTensor has no placement for all rows of uneven parts, and where the gradient comes
    in others than the result, its backward fails.
    """
    given = canonical_call(node).arguments
    x, value = given["input"], known.value(given["input"])
    operands: list[fx.Node | NewCall | None] = []
    for y in (given["weight"], given["bias"]):
        of_layer = known.value(y)
        if isinstance(of_layer, DTensor):
            if not all(p.is_replicate() for p in of_layer.placements):
                return None
            operands.append(y)
        else:  # one that requires no gradient
            operands.append(y and NewCall(cp_replicate, (y, known.cp_axis)))
    if not isinstance(value, DTensor):
        return None
    split = [p for p in value.placements if not p.is_replicate()]
    if len(split) != 1 or getattr(split[0], "dim", -1) not in range(value.ndim - 1):
        return None
    return Replace(NewCall(cp_linear_of_parts, (x, *operands)))


def _is_batch_of_parts(known: GraphValues, value: Any) -> bool:
    """Tell whether ranks have parts of a batch that torch flattens with what is inside.

    Parts of each sample, such as windows, or uneven numbers of frames.
    """
    if not isinstance(value, DTensor) or value.ndim < _BATCHED:
        return False
    placement = value.placements[known.ctx.axis]
    batch, *inside, _ = value.shape
    is_uneven = not is_symbol(batch) and batch % known.ctx.ranks != 0
    of_frames = placement == Shard(0) and is_uneven and math.prod(inside) != 1
    return of_frames or isinstance(placement, StridedShard)


def product_of_plain(known: GraphValues, node: fx.Node) -> Propagate | None:
    """Cut what every rank has before it meets weights, if the result has tokens.

    Such are embedded times of tokens, and patches that frozen weights make: every rank
    would compute the product of all.
    """
    tensors = {
        x: value
        for x in node.all_input_nodes
        if isinstance(value := known.value(x), Tensor)
    }
    dims = {
        x: dim
        for x, value in tensors.items()
        if not isinstance(value, DTensor) and value.is_floating_point()
        for dim in [known.sequence_dims.get(x)]
        if dim is not None
    }
    others = [value for value in tensors.values() if isinstance(value, DTensor)]
    if (
        len(dims) != 1
        or node not in known.sequence_dims
        or not all(p.is_replicate() for x in others for p in x.placements)
    ):
        return None
    ((whole, dim),) = dims.items()
    size = tensors[whole].shape[dim.dim] // dim.outer
    if is_symbol(size) and not is_divided(size, known.ctx.ranks):
        return None  # shards of symbolic sizes have to be equal
    cut = known.cut(whole, dim)
    return Propagate(with_inputs(node, lambda x: cut if x is whole else x))


def _cut_label(known: GraphValues, x: Any, labels: Labels) -> str | None:
    """Return the label that the axis splits, "" for none; None if x lies otherwise."""
    if not isinstance(x, DTensor) or x.ndim < _BATCHED:
        return None
    axis = known.ctx.axis
    own, others = x.placements[axis], [*x.placements[:axis], *x.placements[axis + 1 :]]
    if not all(p.is_replicate() for p in others):
        return None
    if own.is_replicate():
        return ""
    return labels[own.dim] if type(own) is Shard else None


def _owners(operands: list[tuple[DTensor, Labels]], label: str) -> tuple[bool, ...]:
    """Return which operands have several entries of a label."""
    return tuple(_token_dim(x, labels, label) is not None for x, labels in operands)


def _token_dim(x: DTensor, labels: Labels, label: str) -> int | None:
    """Return the dimension with the tokens; None if x is the same for all of them."""
    dim = labels.index(label) if label in labels else None
    return None if dim is None or expected(x.shape[dim]) == 1 else dim
