"""Say for common calls which dimensions correspond: the table beside DTensor's proof.

A rule reads the arguments of a call by name, of Dynamo's graph and of aten alike. The
table is quicker than the proof (`flow.py`), which answers for all other calls. A test
compares the two, since a wrong label may be a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ..graph.calls import canonical_call, function_of, spelled
from ..graph.nodes import expected_shape, has_unknown_size, value_of
from .dim_maps import DimMap, Labels

Given = dict[str, Any]  # the arguments of a call by name
DimMapRule = Callable[[fx.Node, Given], DimMap | None]


def dim_map(node: fx.Node) -> DimMap | None:
    """Return the labels of a call; None if the table does not have it.

    None also where only data tells a size, since labels are found by sizes.
    """
    if not isinstance(_value(node), Tensor):
        return None
    if any(has_unknown_size(_value(x)) for x in (node, *node.all_input_nodes)):
        return None
    if (product := product_map(node)) is not None:
        return _without_ones(node, product)
    call = canonical_call(node)
    if {"dim", "dims"} & call.arguments.keys() and not any(
        isinstance(x, Tensor) and x.ndim for x in map(_value, node.all_input_nodes)
    ):
        return None  # torch counts a dimension of a number, to name it
    overload, rule = call.overload, _RULES.get(call.name)
    tags = () if overload is None else overload.tags
    if rule is None and overload is not None and not overload._schema.is_mutable:
        rule = _of_all if torch.Tag.pointwise in tags else None
    call_map = (
        rule(node, call.arguments) if rule is not None and call.arguments else None
    )
    if call_map is not None and torch.Tag.nondeterministic_seeded in tags:
        return replace(call_map, draws=True)
    return call_map


def _value(node: Any) -> Any:
    """Return the fake value of a node, the first one of several results."""
    value = value_of(node)
    return value[0] if isinstance(value, tuple | list) and value else value


def _shape(node: Any) -> tuple[int, ...]:
    return expected_shape(_value(node))


def _every(node: fx.Node) -> Labels:
    return tuple(map(str, range(len(_shape(node)))))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if isinstance(value_of(x), Tensor)]


# Calls that treat every element by itself, after broadcasting from the right.


def _broadcast(node: fx.Node, operands: Iterable[fx.Node]) -> DimMap:
    result = _every(node)
    pairs = [(x, result[len(result) - len(_shape(x)) :]) for x in operands]
    return _without_ones(node, DimMap(tuple(pairs), result))


def _without_ones(node: fx.Node, call_map: DimMap) -> DimMap:
    """Take the labels from dimensions of size 1 that are broadcast."""
    sizes = dict(zip(call_map.result, _shape(node), strict=True))

    def own(x: fx.Node, labels: Labels) -> Labels:
        pairs = zip(labels, _shape(x), strict=True)
        return tuple(k if n != 1 or sizes.get(k, 1) == 1 else "" for k, n in pairs)

    pairs = tuple((x, own(x, labels)) for x, labels in call_map.operands)
    return replace(call_map, operands=pairs)


def _of_all(node: fx.Node, arguments: Given) -> DimMap | None:
    return _broadcast(node, _tensors(node))


def _of_first(node: fx.Node, arguments: Given) -> DimMap | None:
    return _broadcast(node, [arguments["input"]])


def _filled(node: fx.Node, arguments: Given) -> DimMap | None:
    """Read x.new_zeros(size), which takes nothing but a dtype and a device from x."""
    return DimMap((), _every(node))


def _view(node: fx.Node, arguments: Given) -> DimMap | None:
    return DimMap(((arguments["input"], ()),), is_view=True)


# Calls that move or drop dimensions.


ORDERS = (
    "permute", "transpose", "movedim", "t", "numpy_T", "mT", "mH", "adjoint",
    "matrix_H",
)  # fmt: skip


def order_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the dimensions of the argument of a transpose or permute, in new order.

    The order is read off a tensor all of whose sizes differ. None for other calls.
    """
    if spelled(node) not in ORDERS or len(node.all_input_nodes) != 1:
        return None
    sizes = range(2, 2 + len(_shape(node)))
    probe = torch.empty(tuple(sizes), device="meta")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: probe)
    return tuple(map(sizes.index, function_of(node)(*args, **kwargs).shape))


def _permuted(node: fx.Node, arguments: Given) -> DimMap | None:
    order, labels = order_of(node), _every(node)
    if order is None:
        return None
    result = tuple(labels[d] for d in order)
    return DimMap(((arguments["input"], labels),), result)


def _item(node: fx.Node, arguments: Given) -> DimMap | None:
    source, index = arguments["input"], arguments["index"]
    if not isinstance(value_of(source), Tensor):  # one of several results
        return None
    dim_pairs = kept_dims(index, len(_shape(source)))
    if dim_pairs is None:
        return None
    labels, result = [""] * len(_shape(source)), [""] * len(_shape(node))
    for dim, out in dim_pairs:
        labels[dim] = result[out] = str(out)
    cut = [
        str(out) for dim, out in dim_pairs if _shape(source)[dim] != _shape(node)[out]
    ]
    return DimMap(((source, tuple(labels)),), tuple(result), moves=frozenset(cut))


def kept_dims(index: Any, ndim: int) -> list[tuple[int, int]] | None:
    """Return (dimension, dimension of x[index]) of what slices keep.

    None for other indices. A dimension that a slice cuts short is kept.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not _is_basic(item) for item in items):
        return None
    counted = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    dim_pairs, dim, out = [], 0, 0
    for item in items:
        if item is None:
            out += 1
            continue
        length = ndim - counted if item is Ellipsis else 1
        if item is Ellipsis or isinstance(item, slice):
            dim_pairs += [(dim + i, out + i) for i in range(length)]
            out += length
        dim += length
    return dim_pairs


def _is_basic(item: Any) -> bool:
    if isinstance(item, fx.Node):
        return isinstance(value_of(item), int | torch.SymInt)
    plain = item is None or item is Ellipsis or isinstance(item, slice | int)
    return plain and not isinstance(item, bool)


# Reductions.


def _reduction(node: fx.Node, arguments: Given) -> DimMap | None:
    if "other" in arguments:  # the larger of two
        return _of_all(node, arguments)
    labels = _every(arguments["input"])
    reduced = _reduced(arguments)
    kept_labels = ["" if x in reduced else x for x in labels]
    result = kept_labels if arguments.get("keepdim") else [x for x in kept_labels if x]
    return DimMap(((arguments["input"], labels),), tuple(result))


def _reduced(arguments: Given) -> list[str]:
    labels, dims = _every(arguments["input"]), arguments.get("dim")
    if dims is None or dims == []:
        return list(labels)
    return [labels[d] for d in ([dims] if isinstance(dims, int) else dims)]


def _sum(node: fx.Node, arguments: Given) -> DimMap | None:
    call_map = _reduction(node, arguments)
    return (
        None
        if call_map is None
        else replace(call_map, sums=frozenset(_reduced(arguments)))
    )


# Calls along dimensions, which do nothing in the others.


def _along(node: fx.Node, arguments: Given) -> DimMap | None:
    """Read softmax(x, dim) and the like: all operands have the result's dimensions."""
    dim = arguments.get("dim")
    return None if dim is None else _except(node, [dim], _tensors(node))


def _moving(node: fx.Node, arguments: Given) -> DimMap | None:
    """Read calls that take entries of a dimension, or bring them to other places."""
    ndim = len(_shape(node))
    dims = arguments.get("dim", arguments.get("dims", []))
    dims = [dims] if isinstance(dims, int) else dims or range(ndim)
    if "pad" in arguments:
        dims = [ndim - 1 - i // 2 for i, n in enumerate(arguments["pad"]) if n != 0]
    operands = arguments.get("tensors") or [arguments["input"]]
    # torch ignores empty tensors, as which caches begin.
    call_map = _except(node, dims, [x for x in operands if _shape(x) != (0,)])
    if call_map is None:
        return None
    labels = _every(node)
    pairs = tuple((x, labels) for x, _ in call_map.operands)
    return DimMap(pairs, labels, moves=frozenset(labels[d] for d in dims))


def _stacked(node: fx.Node, given: Given) -> DimMap | None:
    labels, dim = _every(node), given.get("dim") or 0
    own = tuple(x for d, x in enumerate(labels) if d != dim % len(labels))
    pairs = tuple((x, own) for x in given["tensors"])
    return DimMap(pairs, _without(labels, [dim]))


def _except(
    node: fx.Node, dims: Iterable[int], operands: Iterable[fx.Node]
) -> DimMap | None:
    labels = _every(node)
    if any(_every(x) != labels for x in operands):
        return None
    rest = _without(labels, dims)
    return DimMap(tuple((x, rest) for x in operands), rest)


def _without(labels: Labels, dims: Iterable[int]) -> Labels:
    none = {dim % len(labels) for dim in dims}
    return tuple("" if dim in none else x for dim, x in enumerate(labels))


# Look-ups: every index has a result of its own, from a table that is whole.


def _gathered(node: fx.Node, arguments: Given) -> DimMap | None:
    x, dim, index = arguments["input"], arguments["dim"], arguments["index"]
    labels = _every(node)
    if not labels:
        return None  # one entry of a number
    own = (labels[dim],) if len(_shape(index)) == 1 else labels  # of index_select
    if len(_shape(index)) != len(own) or _every(x) != labels:
        return None
    return DimMap(((x, _without(labels, [dim])), (index, own)), labels)


def _embedded(node: fx.Node, arguments: Given) -> DimMap | None:
    return _looked_up(node, arguments["weight"], [arguments["input"]])


def _indexed(node: fx.Node, arguments: Given) -> DimMap | None:
    return _looked_up(node, arguments["input"], arguments["indices"])


def _is_number(index: fx.Node) -> bool:
    """Tell whether an index is no mask."""
    return value_of(index).dtype not in (torch.bool, torch.uint8)


def _looked_up(node: fx.Node, table: fx.Node, indices: list[Any]) -> DimMap | None:
    """Read table[i, j], where tensors stand for the first dimensions."""
    if not all(isinstance(i, fx.Node) and _is_number(i) for i in indices):
        return None
    dims = {len(_shape(i)) for i in indices}
    if len(dims) != 1:
        return None
    (count,), labels = dims, _every(node)
    rest = (*[""] * len(indices), *labels[count:])
    pairs = ((table, rest), *((i, labels[:count]) for i in indices))
    return _without_ones(node, DimMap(pairs, labels))


# Products, with the labels that einsum has.


def product_map(node: fx.Node) -> DimMap | None:
    """Return the labels of a product of two tensors; None for any other call.

    The first two operands are the factors, whatever their sizes are. What is added
    comes after them.
    """
    name = spelled(node)
    if name == "einsum":
        return _einsum(*node.args) if len(node.args) > 1 else None
    if name == "cp_whole::product":  # see whole/keep_products
        a, b, equation = node.args
        return _einsum(equation, a, b)
    arguments = canonical_call(node).arguments if name in _PRODUCTS else {}
    operands = [x for x in arguments.values() if isinstance(x, fx.Node)]
    if len(operands) not in (2, 3):
        return None
    *added, lhs, rhs = operands
    dims = [len(_shape(x)) for x in (lhs, rhs)]
    if min(dims) < 2:
        return None
    # Dimensions of the batch are aligned at their ends, as torch broadcasts them.
    batch = [f"b{n}" for n in reversed(range(max(dims) - 2))]
    own = [tuple(batch[len(batch) - (n - 2) :]) for n in dims]
    result = (*batch, "m", "n")
    factors = ((lhs, (*own[0], "m", "d")), (rhs, (*own[1], "d", "n")))
    addends = tuple((x, result[len(result) - len(_shape(x)) :]) for x in added)
    # Every part would add what is added.
    sums = frozenset[str]() if added else frozenset("d")
    return DimMap((*factors, *addends), result, sums)


_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm")


def _einsum(equation: Any, *args: Any) -> DimMap | None:
    operands = args[0] if isinstance(args[0], list | tuple) else args
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    terms = zip(inputs.split(","), operands, strict=True)
    lhs, rhs = (_expanded(term, len(_shape(x))) for term, x in terms)
    if lhs is None or rhs is None:
        return None
    dots = [x for x in (*lhs, *rhs) if x.startswith(".")]
    most = len({*dots})
    result = _expanded(out, len(out.replace("...", "")) + most * ("..." in out))
    if result is None or any(len({*x}) != len(x) for x in (lhs, rhs, result)):
        return None
    sums = frozenset({*lhs, *rhs} - {*result})
    return DimMap(((operands[0], lhs), (operands[1], rhs)), result, sums)


def _expanded(term: str, ndim: int) -> Labels | None:
    """Return the labels of one operand, `...` written out from its end."""
    before, dots, after = term.partition("...")
    missing = ndim - len(before) - len(after)
    if missing < 0 or (missing and not dots):
        return None
    return (*before, *(f".{n}" for n in reversed(range(missing))), *after)


def _linear(node: fx.Node, arguments: Given) -> DimMap | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    labels = _every(node)
    if len(_shape(weight)) != 2:
        return None
    pairs = ((x, (*labels[:-1], "d")), (weight, (labels[-1], "d")))
    if bias is None:
        return DimMap(pairs, labels, frozenset("d"))
    return DimMap((*pairs, (bias, labels[-1:])), labels)


_RULES: dict[str, DimMapRule] = {
    **dict.fromkeys(("copy", "rand_like", "bernoulli", "full"), _of_all),
    **dict.fromkeys(
        ("_to_copy", "to", "alias", "detach", "lift_fresh_copy", "clone", "contiguous",
         "expand", "expand_as", "full_like", "zeros_like", "ones_like",
         "native_dropout", "silu", "relu", "logsigmoid", "log_sigmoid"),
        _of_first,
    ),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten",
         "unflatten", "view_as", "reshape_as", "view_as_real", "view_as_complex"),
        _view,
    ),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _filled),
    **dict.fromkeys(ORDERS, _permuted),
    "getitem": _item,
    "sum": _sum,
    **dict.fromkeys(
        ("mean", "amax", "amin", "any", "all", "logsumexp", "prod", "max", "min",
         "argmax", "argmin", "var", "std", "var_mean", "select", "unbind"),
        _reduction,
    ),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "topk",
         "sort", "_softmax_backward_data", "_log_softmax_backward_data", "scatter",
         "scatter_add", "scatter_reduce", "slice_scatter"),
        _along,
    ),
    **dict.fromkeys(
        ("cat", "slice", "narrow", "roll", "flip", "pad", "constant_pad_nd", "dropout",
         "split", "split_with_sizes", "masked_scatter", "masked_scatter_", "index_put",
         "index_put_"),
        _moving,
    ),
    "stack": _stacked,
    **dict.fromkeys(("gather", "index_select"), _gathered),
    "embedding": _embedded,
    "index": _indexed,
    "linear": _linear,
}  # fmt: skip
