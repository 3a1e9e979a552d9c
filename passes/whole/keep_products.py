"""Keep the dimensions apart that products flatten.

    mm(view(x, [B*S, K]), w)                ->  product(x, w, "abc,cd->abd")
    mm(t(view(dy, [B*S, N])), view(x))      ->  product(dy, x, "abc,abd->cd")
    q [B, S, H, K] -> view [B*S, H, K]
    k [B, 1, K, T] -> expand -> view [B*S, K, T]
    bmm(q, k) [B*S, H, T] -> view           ->  product(q, k, "abcd,ade->abce")

AOTAutograd flattens them. Tokens that are flattened with others are no shard that
DTensor knows; what is expanded to all tokens is not copied for each of them. A view
that follows and undoes the flattening goes, also behind a bias. On a rank the product
of the parts is what it was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import expected, hashable, is_same
from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.ops.dtensor.shares import sharing_rows
from cpcompile.torch_private.distributed import DTensorSpec, StridedShard, TensorMeta

from ..graph.graph_pass import graph_pass
from ..graph.local_notes import NOTES
from ..graph.sequence_tokens import TokenDim
from .cut_alike import local_of
from .local_calls import replicated
from .token_order import TokenOrder, in_order

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@torch.library.custom_op("cp_whole::product", mutates_args=())
def product(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Return torch.einsum(equation, a, b)."""
    return torch.einsum(equation, a, b).contiguous()


@product.register_fake
def _(a: Tensor, b: Tensor, equation: str) -> Tensor:
    sizes, result = _sizes(a, b, equation), equation.split("->")[1]
    return a.new_empty([sizes[letter] for letter in result])


PRODUCT = torch.ops.cp_whole.product.default


@dataclass
class _Operand:
    """A factor of a product, before it was flattened.

    groups: of each dimension of the factor, those of `source` that have several
        entries. expanded: dimensions in which all entries are alike.
    """

    source: fx.Node
    groups: list[list[int]]
    sizes: list[Any]
    expanded: frozenset[int]


@graph_pass()
def keep_products(graph: fx.Graph, _: object) -> int:
    """Rewrite the products of flattened dimensions; return how many."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        _take_apart(graph, node)
    count = 0
    for node in [x for x in graph.nodes if x.target in _PRODUCTS]:
        a, b = map(_unflattened, node.args)
        if node.target is aten.mm.default:
            for x in (a, b):
                x.groups.insert(0, [])
        of_a, of_b = ([[x.sizes[d] for d in g] for g in x.groups] for x in (a, b))
        alike = _are_alike(of_a[0], of_b[0]) and _are_alike(of_a[2], of_b[1])
        if alike and (_is_flat(a) or _is_flat(b)):
            _write(graph, node, a, b)
            count += 1
    graph.eliminate_dead_code()
    return count


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Write bias + product for an addmm without factors."""
    if node.kwargs:
        return
    bias, *factors = node.args
    value = node.meta["val"]
    with graph.inserting_before(node):
        rows = call_like(graph, aten.mm.default, tuple(factors), node, value)
        total = call_like(graph, aten.add.Tensor, (rows, bias), node, value)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _adds_a_row(node: fx.Node, product: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.args[0] is not product:
        return False
    other = node.args[1]
    if node.kwargs or not isinstance(other, fx.Node):
        return False
    return bool(other.meta["val"].ndim == 1)


def _are_alike(sizes: list[Any], others: list[Any]) -> bool:
    return len(sizes) == len(others) and all(map(is_same, sizes, others))


def _is_flat(x: _Operand) -> bool:
    """Tell whether dimensions were flattened, or entries are alike."""
    return bool(x.expanded) or any(len(group) > 1 for group in x.groups)


def _unflattened(x: Any) -> _Operand:
    """Return what a factor is a view of."""
    sizes = list(x.meta["val"].shape)
    own = [[d] if not is_same(n, 1) else [] for d, n in enumerate(sizes)]
    as_it_is = _Operand(x, own, sizes, frozenset())
    if x.target in _TRANSPOSES:
        dims = _permutation(x)
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
    if x.target is aten.t.default:
        return [1, 0]
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
    added = next(iter(node.users)) if len(node.users) == 1 else None
    if added is not None and len(columns) <= 1 and _adds_a_row(added, node):
        args = (new, added.args[1])
        with graph.inserting_before(added):
            new = call_like(graph, aten.add.Tensor, args, added, value)
        node = added
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
            return _local(a, b, equation)
        mesh = (a if isinstance(a, DTensor) else b).device_mesh
        a, b = (x if isinstance(x, DTensor) else replicated(x, mesh) for x in (a, b))
        return _product(order, a, b, equation)

    return {PRODUCT: rule}


def _product(order: TokenOrder, a: DTensor, b: DTensor, equation: str) -> DTensor:
    factors, result = equation.split("->")
    of_a, of_b = factors.split(",")
    placements: list[Placement] = []
    for axis in range(a.device_mesh.ndim):
        cut = [_letter(x, n, axis) for x, n in ((a, of_a), (b, of_b))]
        sums = [x.placements[axis] for x in (a, b) if x.placements[axis].is_partial()]
        waits = [p for p in sums if type(p) is Partial and p.is_partial("sum")]
        if len(sums) == len(waits) == 1 and not any(cut):
            placements.append(Partial())
            continue
        # Of two that are cut, the smaller one is what the other needs of it.
        letter = cut[expected(a.numel()) < expected(b.numel())] or cut[0] or cut[1]
        named = ((a, of_a), (b, of_b))
        have = [x.placements[axis] for x, n in named if letter and letter in n]
        cut_along = _shards(have)
        a, b = (
            _cut(order, x, axis, n.find(letter) if letter else -1, cut_along)
            for x, n in named
        )
        where = result.find(letter) if letter else -1
        if letter is None:
            placements.append(Replicate())
        else:
            placements.append(Partial() if where < 0 else cut_along(where))
    rows: tuple[Any, Any] = (1, 1)
    for x in (a, b):
        dim = getattr(x.placements[order.cp_axis.axis], "dim", None)
        if dim is not None:
            rows = x.shape[dim], x._local_tensor.shape[dim]
    with sharing_rows(a.device_mesh, placements, *rows):
        local = _local(local_of(a), local_of(b), equation)
    sizes = _sizes(a, b, equation)
    shape = torch.Size([sizes[letter] for letter in result])
    meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(a.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _local(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Return the einsum by one product of a batch, or of rows if there is none."""
    factors, result = equation.split("->")
    of_a, of_b = factors.split(",")
    a, of_a = _without_own(a, of_a, of_b + result)
    b, of_b = _without_own(b, of_b, of_a + result)
    equation = f"{of_a},{of_b}->{result}"
    batch = [x for x in of_a if x in of_b and x in result]
    inner = [x for x in of_a if x in of_b and x not in result]
    rows, columns = (
        [x for x in of if x not in (*batch, *inner)] for of in (of_a, of_b)
    )
    sizes = _sizes(a, b, equation)

    def flat(x: Tensor, of: str, *groups: list[str]) -> Tensor:
        order = [of.index(letter) for group in groups for letter in group]
        x = x.permute(order) if order != sorted(order) else x
        return x.reshape([math.prod(sizes[i] for i in group) for group in groups])

    if batch:
        groups = ((batch, rows, inner), (batch, inner, columns))
        found = torch.bmm(flat(a, of_a, *groups[0]), flat(b, of_b, *groups[1]))
    else:
        found = torch.mm(flat(a, of_a, rows, inner), flat(b, of_b, inner, columns))
    made = [*batch, *rows, *columns]
    found = found.view([sizes[letter] for letter in made])
    order = [made.index(letter) for letter in result]
    return found if order == sorted(order) else found.permute(order).contiguous()


def _without_own(x: Tensor, letters: str, others: str) -> tuple[Tensor, str]:
    """Add up a factor along dimensions that nothing else has."""
    own = [dim for dim, letter in enumerate(letters) if letter not in others]
    kept = "".join(letter for letter in letters if letter in others)
    return (x.sum(own) if own else x), kept


def _sizes(a: Tensor, b: Tensor, equation: str) -> dict[str, Any]:
    """Return the sizes of the dimensions by their letters."""
    of_a, of_b = equation.split("->")[0].split(",")
    sizes = dict(zip(of_a, a.shape, strict=True))
    return sizes | dict(zip(of_b, b.shape, strict=True))


def _letter(x: DTensor, letters: str, axis: int) -> str | None:
    """Return the dimension that an axis of the mesh cuts."""
    dim = getattr(x.placements[axis], "dim", None)
    return None if dim is None else letters[dim]


def _shards(found: Iterable[Placement]) -> Callable[[int], Placement]:
    """Return the placement along a dimension: rows of a flattened batch stay so."""
    factors = {getattr(p, "split_factor", 1) for p in found}
    if factors and factors != {1} and len(factors) == 1:
        return functools.partial(StridedShard, split_factor=factors.pop())
    return Shard


def _cut(
    order: TokenOrder,
    x: DTensor,
    axis: int,
    dim: int,
    cut_along: Callable[[int], Placement],
) -> DTensor:
    """Cut a factor along a dimension; -1 is whole."""
    wanted: Placement = cut_along(dim) if dim >= 0 else Replicate()
    placements = list(x.placements)
    if placements[axis] == wanted:
        return x
    if not placements[axis].is_replicate():  # a sum, or rows of a flattened batch
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    if dim < 0:
        return x
    length = x.shape[dim]
    lengths = map(hashable, order.lengths if axis == order.cp_axis.axis else ())
    if hashable(length) in lengths and order.layout is not Layout.CONTIGUOUS:
        x = in_order(x, TokenDim(dim), order.of_length(length))
    placements[axis] = wanted
    return x.redistribute(placements=placements)
