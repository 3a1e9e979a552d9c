"""Keep the dimensions apart that a product of a batch flattens.

    q [B, S, H, K] -> view [B*S, H, K]         bmm(q, k) [B*S, H, T] -> view
    k [B, 1, K, T] -> expand -> view [B*S, K, T]
      ->
    cp_whole.product(q, k, "abcd,ade->abce")   [B, S, H, T]

Tokens that are flattened with others are no shard that DTensor knows, and what is
expanded to all tokens is not copied for each of them. On a rank an einsum of the parts
takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import is_same
from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.torch_private.distributed import DTensorSpec, TensorMeta

from ..graph.local_notes import NOTES
from ..graph.sequence_tokens import TokenDim
from .cut_alike import local_of
from .local_calls import replicated
from .reduced_tokens import summed
from .token_order import TokenOrder, in_order

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_TRANSPOSES = (aten.transpose.int, aten.permute.default)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@torch.library.custom_op("cp_whole::product", mutates_args=())
def product(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Return torch.einsum(equation, a, b)."""
    return _einsum(a, b, equation)


def _einsum(a: Tensor, b: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, a, b).contiguous()


@product.register_fake
def _(a: Tensor, b: Tensor, equation: str) -> Tensor:
    operands, result = equation.split("->")
    sizes: dict[str, Any] = {}
    for x, letters in zip((a, b), operands.split(","), strict=True):
        sizes |= dict(zip(letters, x.shape, strict=True))
    return a.new_empty([sizes[letter] for letter in result])


PRODUCT = torch.ops.cp_whole.product.default


# In the graph of the whole sequence


@dataclass
class _Operand:
    """A factor of a product of a batch, before it was flattened.

    groups: of the three dimensions of the factor, those of `source` that have several
        entries. expanded: dimensions in which all entries are alike.
    """

    source: fx.Node
    groups: list[list[int]]
    sizes: list[Any]
    expanded: frozenset[int]


def keep_batched(graph: fx.Graph) -> int:
    """Rewrite the products of flattened dimensions; return how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        a, b = map(_unflattened, node.args)
        of_a, of_b = ([[x.sizes[d] for d in g] for g in x.groups] for x in (a, b))
        alike = _are_alike(of_a[0], of_b[0]) and _are_alike(of_a[2], of_b[1])
        if alike and (_is_flat(a) or _is_flat(b)):
            _write(graph, node, a, b)
            count += 1
    return count


def _are_alike(sizes: list[Any], others: list[Any]) -> bool:
    return len(sizes) == len(others) and all(map(is_same, sizes, others))


def _is_flat(x: _Operand) -> bool:
    """Tell whether dimensions were flattened, or entries are alike."""
    return bool(x.expanded) or any(len(group) > 1 for group in x.groups)


def _unflattened(x: Any) -> _Operand:
    """Return what a factor [N, I, J] is a view of."""
    sizes = list(x.meta["val"].shape)
    own = [[d] if not is_same(n, 1) else [] for d, n in enumerate(sizes)]
    as_it_is = _Operand(x, own, sizes, frozenset())
    if x.target in _TRANSPOSES and len(sizes) == len(as_it_is.groups):
        dims = _permutation(x)
        if dims[0] != 0:
            return as_it_is
        found = _unflattened(x.args[0])
        found.groups = [found.groups[d] for d in dims]
        return found
    source = x.args[0] if x.target in VIEWS else x
    if source.target is aten.clone.default and x.target in VIEWS:
        source = source.args[0]
    apart = list(source.meta["val"].shape)
    groups = _groups(apart, sizes)
    if groups is None:
        return as_it_is
    if source.target is not aten.expand.default:
        return _Operand(source, groups, apart, frozenset())
    narrow = source.args[0]
    before = list(narrow.meta["val"].shape)
    before = [1] * (len(apart) - len(before)) + before
    pairs = zip(before, apart, strict=True)
    alike = {d for d, (n, m) in enumerate(pairs) if is_same(n, 1) and not is_same(m, 1)}
    return _Operand(source, groups, apart, frozenset(alike))


def _permutation(x: fx.Node) -> list[int]:
    source, *how = x.args
    if x.target is aten.permute.default:
        dims: Any = how[0]
        return [d % len(dims) for d in dims]
    order = list(range(source.meta["val"].ndim))  # type: ignore[union-attr]
    i, j = (int(d) % len(order) for d in how)  # type: ignore[arg-type]
    order[i], order[j] = order[j], order[i]
    return order


def _groups(sizes: list[Any], flat: list[Any]) -> list[list[int]] | None:
    """Return which dimensions of `sizes` each of `flat` joins; None if they do not.

    Dimensions of one entry are in none.
    """
    dims = [d for d, n in enumerate(sizes) if not is_same(n, 1)]
    groups: list[list[int]] = []
    for n in flat:
        group: list[int] = []
        while not is_same(math.prod(sizes[d] for d in group), n):
            if not dims:
                return None
            group.append(dims.pop(0))
        groups.append(group)
    return groups if not dims else None


def _write(graph: fx.Graph, node: fx.Node, a: _Operand, b: _Operand) -> None:
    letters = iter(_LETTERS)
    batch, rows, inner = ([next(letters) for _ in group] for group in a.groups)
    columns = [next(letters) for _ in b.groups[2]]
    of_a, of_b = _named(a, (batch, rows, inner)), _named(b, (batch, inner, columns))
    pairs = ((a, of_a), (b, of_b))
    sizes = {of[d]: x.sizes[d] for x, of in pairs for d in of}
    alike_a, alike_b = ({of[d] for d in x.expanded} for x, of in pairs)
    without = (alike_a - alike_b) & {*of_b.values()}, alike_b & {*of_a.values()}
    result = [*batch, *rows, *columns]
    flat = node.meta["val"]
    value = flat.new_empty([sizes[letter] for letter in result])
    words, factors = [], []
    with graph.inserting_before(node):
        for (x, of), left_out in zip(pairs, without, strict=True):
            kept = {d: letter for d, letter in of.items() if letter not in left_out}
            words.append("".join(kept[d] for d in sorted(kept)))
            factors.append(
                _without(graph, x, [d for d in range(len(x.sizes)) if d not in kept])
            )
        equation = f"{','.join(words)}->{''.join(result)}"
        new = call_like(graph, PRODUCT, (*factors, equation), node, value)
    for user in list(node.users):
        if user.target in VIEWS:
            user.args = (new, list(user.meta["val"].shape))
    with graph.inserting_after(new):
        args = (new, list(flat.shape))
        flattened = call_like(graph, aten.view.default, args, node, flat)
    node.replace_all_uses_with(flattened)


def _named(x: _Operand, names: tuple[list[str], ...]) -> dict[int, str]:
    """Return the letters of the dimensions of a factor that have several entries."""
    groups = zip(x.groups, names, strict=True)
    return {d: own for group, n in groups for d, own in zip(group, n, strict=True)}


def _without(graph: fx.Graph, x: _Operand, dims: list[int]) -> fx.Node:
    """Return a factor without some dimensions in which it is expanded, or has one."""
    if not dims:
        return x.source
    if x.expanded.isdisjoint(dims):
        value = x.source.meta["val"].squeeze(dims)
        return call_like(graph, aten.squeeze.dims, (x.source, dims), x.source, value)
    new: Any = x.source.args[0]
    value = new.meta["val"]
    missing = len(x.sizes) - value.ndim
    own = [d - missing for d in dims if d >= missing]
    if own:
        value = value.squeeze(own)
        new = call_like(graph, aten.squeeze.dims, (new, own), x.source, value)
    left = [n for d, n in enumerate(x.sizes) if d not in dims]
    if not _are_alike(left, list(value.shape)):
        args, value = (new, left), value.expand(left)
        new = call_like(graph, aten.expand.default, args, x.source, value)
    return new  # type: ignore[no-any-return]


def call_like(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any
) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in NOTES if key in like.meta}
    node.meta["val"] = value
    return node


# On a rank


def product_rules(order: TokenOrder) -> dict[Any, Callable[..., Any]]:
    """Return the rule of a product, by call."""

    def rule(a: Any, b: Any, equation: str) -> Any:
        if not isinstance(a, DTensor) and not isinstance(b, DTensor):
            return _einsum(a, b, equation)
        mesh = (a if isinstance(a, DTensor) else b).device_mesh
        a, b = (x if isinstance(x, DTensor) else replicated(x, mesh) for x in (a, b))
        return _product(order, a, b, equation)

    return {PRODUCT: rule}


def _product(order: TokenOrder, a: DTensor, b: DTensor, equation: str) -> DTensor:
    factors, result = equation.split("->")
    of_a, of_b = factors.split(",")
    placements: list[Placement] = []
    for axis in range(a.device_mesh.ndim):
        sums = [x.placements[axis].is_partial() for x in (a, b)]
        cut = [_letter(x, n, axis) for x, n in ((a, of_a), (b, of_b))]
        if any(sums) and (all(sums) or any(cut)):
            a, b, sums = summed(a), summed(b), []
        if any(sums):
            placements.append(Partial())
            continue
        # Of two that are cut, the smaller one is what the other needs of it.
        letter = cut[a.numel() < b.numel()] or cut[0] or cut[1]
        a, b = (
            _cut(order, x, axis, n.find(letter) if letter else -1)
            for x, n in ((a, of_a), (b, of_b))
        )
        where = result.find(letter) if letter else -1
        if letter is None:
            placements.append(Replicate())
        else:
            placements.append(Partial() if where < 0 else Shard(where))
    local = _einsum(local_of(a), local_of(b), equation)
    sizes = {
        **dict(zip(of_a, a.shape, strict=True)),
        **dict(zip(of_b, b.shape, strict=True)),
    }
    shape = torch.Size([sizes[letter] for letter in result])
    meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(a.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _letter(x: DTensor, letters: str, axis: int) -> str | None:
    """Return the dimension that an axis of the mesh cuts."""
    dim = getattr(x.placements[axis], "dim", None)
    return None if dim is None else letters[dim]


def _cut(order: TokenOrder, x: DTensor, axis: int, dim: int) -> DTensor:
    """Cut a factor along a dimension; -1 is whole."""
    wanted: Placement = Shard(dim) if dim >= 0 else Replicate()
    placements = list(x.placements)
    if placements[axis] == wanted:
        return x
    if not placements[axis].is_replicate():  # also rows of a flattened batch
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    if dim < 0:
        return x
    length = x.shape[dim]
    of_tokens = axis == order.cp_axis.axis and length in order.lengths
    if of_tokens and order.layout is not Layout.CONTIGUOUS:
        x = in_order(x, TokenDim(dim), order.of_length(length))
    placements[axis] = wanted
    return x.redistribute(placements=placements)
