"""Match attention patterns, from the softmax to the two products.

    scores = matmul(q, k.mT) * 0.25 + mask          upwards: what the scores are
    weights = dropout(softmax(scores, -1), 0.0)     downwards: what becomes of them
    out = matmul(weights, v)

Reading changes nothing. Calls are read by what they mean, whatever their order and
spelling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
import torch.fx as fx

from ...flow.dim_rules import order_of
from ...graph.calls import canonical_call, spelled
from ...graph.nodes import all_nodes, fake_value
from .arrangement import Arranged, DimLabels, Regrouping, regrouping
from .matched import AttentionPattern, Scores, Term
from .products import Product, read_product, untransposed
from .refills import refilled
from .scores import CONVERSIONS, LOW, VIEWS, read_scores

SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
WITHOUT_LAST = (..., slice(None, -1, None))  # all weights but those of sinks
_VALUE = "value"  # label of the columns of v


@dataclass(frozen=True)
class Weights:
    """Weights that a softmax gives, as they are after some calls."""

    nodes: tuple[fx.Node, ...]
    labels: DimLabels
    shape: tuple[int, ...]
    regroupings: tuple[Regrouping, ...] = ()
    dropout_p: float = 0.0

    def then(self, node: fx.Node) -> Weights:
        return replace(self, nodes=(*self.nodes, node))


def attention_patterns(graph: fx.Graph) -> Iterator[AttentionPattern]:
    """Yield every attention of a graph and its checkpoint regions that can be read."""
    for node in all_nodes(graph):
        if spelled(node) in SOFTMAX:
            attention = read_softmax(node)
            if attention is not None:
                yield attention


def read_softmax(softmax: fx.Node) -> AttentionPattern | None:
    """Read the attention that a softmax is a part of; None if it cannot be read."""
    arguments = canonical_call(softmax).arguments
    source, dim, dtype = (
        arguments.get("input"),
        arguments.get("dim"),
        arguments.get("dtype"),
    )
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        return None
    sums = tuple(x for x in source.users if spelled(x) == "logsumexp")
    scores = read_scores(source, softmax, sums)
    if scores is None or (sums and not gives_log_sum(scores, sums, dim)):
        return None
    weights: Weights | None = Weights((softmax,), scores.labels, scores.shape)
    if scores.sinks is not None:
        weights = _without_sinks(softmax, scores)
    while weights is not None and len(weights.nodes[-1].users) == 1:
        (user,) = weights.nodes[-1].users
        product = read_product(user)
        if product is not None:
            attention = _attention(scores, scores.labels[dim], weights, user, product)
            return (
                attention
                if attention is None or not sums
                else with_log_sum(attention, sums[0])
            )
        following = next_weights(weights, user)
        if following is None and weights.labels == scores.labels:
            hides = refilled(scores, weights.nodes[-1], user)
            if hides is not None:
                scores, following = hides, weights.then(user)
        weights = following
    return None


def _without_sinks(softmax: fx.Node, scores: Scores) -> Weights | None:
    """Read the weights without the column of sinks: softmax(...)[..., :-1]."""
    nodes = [softmax]
    while len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        nodes.append(user)
        call = canonical_call(user)
        if call.name == "getitem":
            cut = call.arguments["index"] == WITHOUT_LAST
            shape = (*scores.shape[:-1], scores.shape[-1] - 1)
            return Weights(tuple(nodes), scores.labels, shape) if cut else None
        if call.name not in CONVERSIONS:
            return None
    return None


def next_weights(weights: Weights, user: fx.Node) -> Weights | None:
    """Return the weights after a call that leaves them what they are; else None."""
    call, value = canonical_call(user), fake_value(user)
    if call.arguments.get("input") is not weights.nodes[-1]:
        return None
    if call.name == "dropout":
        p = call.arguments["p"] if call.arguments["training"] else 0.0
        if not isinstance(p, int | float) or (p and weights.dropout_p):
            return None
        return replace(weights.then(user), dropout_p=p or weights.dropout_p)
    if call.name in CONVERSIONS and value.is_floating_point():
        return weights.then(user)
    shape = tuple(value.shape)
    if call.name in VIEWS:
        if shape == weights.shape:
            return weights.then(user)
        how = regrouping(weights.labels, weights.shape, shape)
        if how is None:
            return None
        labels = (*how.after, *weights.labels[-2:])
        regroupings = (*weights.regroupings, how)
        changed = replace(weights.then(user), labels=labels, shape=shape)
        return replace(changed, regroupings=regroupings)
    order = order_of(user)
    if order is None:
        return None
    labels = tuple(weights.labels[i] for i in order)
    return replace(weights.then(user), labels=labels, shape=shape)


def _attention(
    scores: Scores, keys: str, weights: Weights, out: fx.Node, second: Product
) -> AttentionPattern | None:
    """Join all of it in one order of dimensions; None where that is not possible.

    keys: the label over which the softmax is. The leading dimensions are those of the
    scores at the softmax.
    """
    first = scores.product
    q, k = first.operands
    if keys in q.labels:
        q, k = k, q
    if keys in q.labels or len(first.summed) != 1:
        return None  # softmax over what both have, as heads
    mine = [x for x in first.out_labels if x in q.labels and x not in k.labels]
    if not mine:
        return None
    queries, (inner,) = mine[-1], first.summed
    leading = [x for x in first.out_labels if x not in (queries, keys)]
    arranged = _arranged(scores, q, k, leading, (queries, keys, inner))
    values = _values(scores, weights, second, (queries, keys))
    if arranged is None or values is None:
        return None
    v, raw, labels = values
    found_q, found_k, every = arranged
    scales = tuple((t, x) for t, x in every if t.scales)
    terms = tuple((t, x) for t, x in every if not t.scales)
    if found_q.labels[:-2] != v.labels[:-2]:
        return None
    if any(x.value.shape[-1] != 1 for _, x in scales):
        return None  # another one for every key
    return AttentionPattern(
        found_q,
        found_k,
        v,
        scores.factor,
        scores.cap,
        scores.sinks,
        float(weights.dropout_p),
        terms,
        weights.regroupings,
        labels,
        tokens=(
            (q.node, q.labels.index(queries)),
            (k.node, k.labels.index(keys)),
            (raw.node, raw.labels.index(keys)),
        ),
        nodes=(*scores.nodes, *weights.nodes, out),
        scales=scales,
    )


def _arranged(
    scores: Scores,
    q: Arranged,
    k: Arranged,
    leading: Sequence[str],
    names: tuple[str, str, str],
) -> tuple[Arranged, Arranged, tuple[tuple[Term, Arranged], ...]] | None:
    """Bring q, k and the mask's terms to the leading dimensions of the softmax."""
    queries, keys, inner = names
    new_q = q.ordered([*leading, queries, inner])
    new_k = k.ordered([*leading, keys, inner])
    if new_q is None or new_k is None:
        return None
    labels, terms = tuple(leading), list[tuple[Term, Arranged]]()
    for count in range(len(scores.regroupings) + 1):
        if count:
            how = scores.regroupings[count - 1]
            if labels != how.before:
                return None
            new_q, new_k = new_q.regrouped(how), new_k.regrouped(how)
            terms = [(term, x.regrouped(how, keep_ones=True)) for term, x in terms]
            labels = how.after
        for term in scores.terms:
            if term.regrouped == count:
                x = Arranged(term.node, term.labels).ordered([*labels, queries, keys])
                if x is None:
                    return None
                terms.append((term, x))
    at_softmax = tuple(x for x in scores.labels if x not in (queries, keys))
    terms = [(t, x) for t, x in terms if not _changes_nothing(t, x, scores)]
    if any(term.node in scores.nodes for term, _ in terms):
        return None  # the maximum of the scores, of other rows than these
    if any(t.low and t.number * t.factor > LOW for t, _ in terms):
        return None  # it was scaled, and hides nothing
    if any(_shows_scores(term, terms[n:], scores) for n, (term, _) in enumerate(terms)):
        return None
    return (new_q, new_k, tuple(terms)) if labels == at_softmax else None


def _changes_nothing(term: Term, x: Arranged, scores: Scores) -> bool:
    """Tell whether a term changes no softmax, because it is the same for all keys.

    What requires a gradient stays: it gets zeros, where without it there were none. The
    maximum of the scores is no such value: they get a gradient in any case.
    """
    added_to_all = term.kind == "add" and x.value.shape[-1] == 1
    is_trained = x.value.requires_grad and term.node not in scores.nodes
    return added_to_all and not is_trained


def _shows_scores(
    term: Term, later: Sequence[tuple[Term, Arranged]], scores: Scores
) -> bool:
    """Tell whether a row without another key differs from one where numbers are added.

    It does not where the lowest number of the dtype hides: scores vanish in it.
    """
    lowest = torch.finfo(fake_value(scores.nodes[0]).dtype).min
    added = any(x.kind == "add" for x, _ in later)
    return term.low and added and term.number * term.factor != lowest


def _values(
    scores: Scores, weights: Weights, second: Product, names: tuple[str, str]
) -> tuple[Arranged, Arranged, DimLabels] | None:
    """Return v as the weights have it at the softmax, v as it is, and result labels.

    None where that is not possible.
    """
    queries, keys = names
    if second.added is not None or second.factor != 1:
        return None
    mine, other = (
        Arranged(second.left, second.left_labels),
        Arranged(second.right, second.right_labels),
    )
    if other.node is weights.nodes[-1]:
        mine, other = other, mine
    if mine.node is other.node:
        return None
    label_names = dict(zip(mine.labels, weights.labels, strict=True))
    new = [x for x in other.labels if x not in label_names]
    if len(new) != 1 or [label_names.get(x) for x in second.summed] != [keys]:
        return None
    label_names[new[0]] = _VALUE
    raw = untransposed(
        Arranged(other.node, tuple(label_names[x] for x in other.labels))
    )
    last = [x for x in weights.labels if x not in (queries, keys)]
    if queries in raw.labels:
        return None
    v = raw.ordered([*last, keys, _VALUE])
    if v is None:
        return None
    labels = tuple(x for x in scores.labels if x not in (queries, keys))
    for how in weights.regroupings:
        if labels != how.before:
            return None
        labels = how.after
    if labels != tuple(last):
        return None
    for how in reversed(weights.regroupings):
        v = v.regrouped(how.back)
    wanted = tuple(label_names[x] for x in second.out_labels)
    if {*wanted} != {*last, queries, _VALUE}:
        return None
    return v, raw, wanted


def gives_log_sum(scores: Scores, sums: tuple[fx.Node, ...], dim: int) -> bool:
    """Tell whether the log-sum-exp that is read is the one that attention gives.

    What is added to a row changes no softmax, but the log-sum-exp. It is not given
    under a bias either: rows are shifted, Note [Rows of low numbers].
    """
    added = scores.shifted or any(t.kind == "add" or t.low for t in scores.terms)
    arguments = canonical_call(sums[0]).arguments
    over = (
        arguments["dim"] if isinstance(arguments["dim"], int) else arguments["dim"][0]
    )
    same = over % len(scores.shape) == dim % len(scores.shape)
    plain = not (added or scores.sinks or scores.regroupings or arguments["keepdim"])
    return plain and same and len(sums) == 1


def with_log_sum(attention: AttentionPattern, lse: fx.Node) -> AttentionPattern | None:
    """Add a log-sum-exp to the attention that gives it.

    None if it is not [B, H, tokens], or is read before the attention is there.
    """
    q, k, v = (x.value.shape for x in (attention.q, attention.k, attention.v))
    if len(q) != 4 or q[:2] != k[:2] or k[:2] != v[:2]:
        return None
    if (
        fake_value(lse).shape != q[:3]
        or attention.labels[:-1] != attention.q.labels[:-1]
    ):
        return None
    before = takewhile(
        lambda node: node is not attention.out, attention.out.graph.nodes
    )
    if not lse.users.keys().isdisjoint(before):
        return None
    return replace(attention, lse=lse)
