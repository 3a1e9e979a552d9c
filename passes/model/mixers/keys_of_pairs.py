"""Mark the keys of what is made of every pair of tokens: ranks have their own queries.

    scores = matmul(q, k.mT)                          q: [B, H, S, D], k: [B, 1, S, D]
    chosen = topk(scores, 16)
      ->
    keys = constraint(k, ALL_ROWS, 2)
    scores = matmul(q, keys.mT)

Both operands of such a product have tokens, and a rank needs all of one of them.
DTensor would bring the smaller one, or what is smaller after it was expanded, and what
chooses keys for a query would then have the keys of a rank. A call that brings together
all keys of a query, but no queries (topk, a softmax, a sort), tells which operand has
the keys. Left alone: sums over the keys, products with parameters, and what brings
together neither or both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx
from torch import Tensor

from ...flow.token_sources import token_sources
from ...graph.nodes import all_nodes, expected_shape, fake_value, insert_call
from ...graph.sequence_tokens import (
    SequenceDim,
    TokenDim,
    Wanted,
    constraint,
    is_row_parallel_operand,
)
from ..patterns.products import Product, read_product
from ..tokens.mixed_sequence import FARTHEST, MixedSequence, computes
from .mixer_seconds import bytes_of


def mark_keys(
    products: Mapping[fx.Node, Product], sequences: Sequence[MixedSequence]
) -> int:
    """Mark the keys of these products; return how many are marked."""
    count = 0
    for node, product in products.items():
        keys = next((k for x in sequences for k in _keys(x, node, product)), None)
        if keys is not None:
            _mark(sequences[0], node, *keys)
            count += 1
    return count


def products_of_pairs(graph: fx.Graph) -> Iterator[tuple[fx.Node, Product]]:
    """Yield the products of two values that something computes."""
    for node in all_nodes(graph):
        product = read_product(node)
        if product is None or product.left is product.right:
            continue
        sides = (product.left, product.right)
        if any(x.op not in ("call_function", "call_method") for x in sides):
            continue
        if not any(map(is_row_parallel_operand, sides)):
            yield node, product


def _keys(
    sequence: MixedSequence, node: fx.Node, product: Product
) -> Iterator[tuple[fx.Node, int]]:
    """Yield an operand that has keys, with their dimension."""
    sides = (
        (product.left, product.left_labels),
        (product.right, product.right_labels),
    )
    for (rows, row_labels), (keys, key_labels) in (sides, sides[::-1]):
        dim = sequence.tokens.dims.get(rows)
        if dim is None or dim.outer > 1 or keys not in sequence.computed:
            continue
        row_label, key_shape = row_labels[dim.dim], expected_shape(fake_value(keys))
        if _size_of(row_label, key_labels, key_shape) > 1:
            continue  # both have it: a product for each token
        row_shape = expected_shape(fake_value(rows))
        for at, label in enumerate(key_labels):
            if label not in product.out_labels or key_shape[at] < 2:
                continue
            if _size_of(label, row_labels, row_shape) > 1:
                continue
            places = map(product.out_labels.index, (row_label, label))
            if row_label in product.out_labels and _keys_meet(sequence, node, *places):
                yield keys, at


def _size_of(label: str, labels: tuple[str, ...], shape: tuple[int, ...]) -> int:
    return shape[labels.index(label)] if label in labels else 1


def _keys_meet(sequence: MixedSequence, node: fx.Node, rows: int, keys: int) -> bool:
    """Tell whether the first call to bring entries together does so to keys alone."""
    classes = [sequence.class_ahead(node, dim) for dim in (rows, keys)]
    waiting, seen = [node], {node}
    while waiting and len(seen) < FARTHEST:
        for user in waiting.pop(0).users:
            if user in seen or not computes(user):
                continue
            seen.add(user)
            row_values, key_values = (x.consumers_of(user) for x in classes)
            if key_values is None or row_values is None:
                return bool(row_values) and key_values is None
            if row_values.keys() == key_values.keys():
                for entries, values in zip(
                    classes, (row_values, key_values), strict=True
                ):
                    entries.dims |= values
                waiting += row_values
    return False


def _mark(sequence: MixedSequence, node: fx.Node, keys: fx.Node, dim: int) -> None:
    """Mark the keys of a product, where they are narrowest on the way to it."""
    user = node
    while len(keys.users) == 1:
        source = _same_tokens(sequence, keys, dim)
        if source is None:
            break
        user, (keys, dim) = keys, source
    with user.graph.inserting_before(user):
        args, value = (keys, Wanted.ALL_ROWS, dim), fake_value(keys)
        marked = insert_call(user.graph, constraint, args, like=user, value=value)
    user.replace_input_with(keys, marked)


def _same_tokens(
    sequence: MixedSequence, node: fx.Node, dim: int
) -> tuple[fx.Node, int] | None:
    """Return the one operand of a call, if it is no wider than the result."""
    value = fake_value(node)
    if node.op not in ("call_function", "call_method") or not isinstance(value, Tensor):
        return None
    wanted = SequenceDim(TokenDim(dim), expected_shape(value)[dim])
    sources = list(token_sources(sequence.flows, node, wanted))
    if len(sources) != 1 or len(node.all_input_nodes) != 1:
        return None
    ((source, at),) = sources
    before = fake_value(source)
    if at.outer > 1 or before.shape[at.dim] != value.shape[dim]:
        return None
    return (source, at.dim) if bytes_of(source) <= bytes_of(node) else None
