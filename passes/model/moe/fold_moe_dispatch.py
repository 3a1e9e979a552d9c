"""Fold tokens that are sorted by expert and brought back into one call.

    expert_ids_g, perm = sort(expert_ids)
    rows = hidden[perm // 2]
    ends = cumsum(histc(expert_ids_g))
    out = grouped_mm(rows, experts, ends) * weights[perm]
    out = out[inverse(perm)].view(tokens, 2, -1)
      ->
    cp_row_parallel = cp_row_parallel(moe_dispatch, hidden, indices, weights, experts)
    out = getitem(cp_row_parallel, 0)

This is the dispatch of a mixture of experts. The call means the same on all tokens and
on the tokens of each rank. Ranks run it on the latter (whole/row_programs), and nothing
is sent.
Counts of tokens per expert that are read elsewhere, for an auxiliary loss, are summed
over the ranks.

Not folded, and gathered with a warning: rows that are read in sorted order outside of
the region, calls that combine rows (cumsum, a mean over tokens), random numbers, groups
that are not those of the sort. With a symbolic number of tokens these raise
LengthNotSymbolic, and the graph is compiled for its length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Set

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import LengthNotSymbolic, Size, is_same, is_symbol

from ...flow.flow import Flows, flows_of
from ...graph.calls import canonical_call, spelled
from ...graph.context import Context
from ...graph.dispatch_calls import NotByRows, given, need
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_graphs, fake_mode_of, fake_value, insert_call, where
from .dispatch_region import DispatchRegion
from .dispatch_rules import RULES, not_negative
from .region_call import region_call, write_region_call

log = logging.getLogger(__name__)

_SEEDS = {"sort", "argsort", "histc", "scatter_add_", "scatter_add", "index_add_",
          "repeat_interleave", "repeat"}  # fmt: skip


@graph_pass(reads=("calls",))
def fold_moe_dispatch(graph: fx.Graph, ctx: Context) -> int:
    """Fold the dispatches of a graph; return how many regions became one call.

    Raises: LengthNotSymbolic if a region has a symbolic number of tokens and is no
        dispatch.
    """
    flows = flows_of(fake_mode_of(graph), ctx.mesh.device_type)
    attention = {call.node for call in ctx.findings.calls}
    folded = 0
    for subgraph in all_graphs(graph):
        _drop_unread_sizes(subgraph)
        for seed in list(subgraph.nodes):
            rows = None if seed._erased else _rows(seed)
            if rows is not None:
                if spelled(seed) != "repeat":
                    _flatten_tokens(subgraph, fake_value(rows).shape[0])
                folded += _rewrite(subgraph, seed, flows, attention)
        if subgraph.owning_module is not None:
            subgraph.owning_module.recompile()
    return folded


def _drop_unread_sizes(graph: fx.Graph) -> None:
    """Erase calls of size() that nobody reads.

    Dynamo leaves them in checkpoint regions, where they would read sorted rows.
    """
    for node in graph.find_nodes(op="call_method", target="size"):
        if not node.users:
            graph.erase_node(node)


def _rows(node: fx.Node) -> fx.Node | None:
    """Return what a call sorts, counts or repeats by row, if it may begin a region."""
    name = spelled(node)
    if name not in _SEEDS:
        return None
    rows = given(node).get("index" if "_add" in name else "input")
    value = fake_value(rows)
    if not isinstance(rows, fx.Node) or not isinstance(value, Tensor):
        return None
    if name == "repeat_interleave" and given(node)["dim"] != 0:
        return None
    return rows if value.ndim == (2 if "repeat" in name else 1) else None


def _flatten_tokens(graph: fx.Graph, numel: Size) -> None:
    """Flatten [B, S, k] -> [B S k] by way of [B S, k], where tokens are dimension 0."""
    for node in graph.nodes:
        call = canonical_call(node)
        if call.name not in ("view", "reshape", "flatten"):
            continue
        source = call.arguments["input"]
        value = fake_value(source)
        shape = fake_value(node).shape
        if value.ndim < 3 or len(shape) != 1 or not is_same(shape[0], numel):
            continue
        tokens = math.prod(value.shape[:-1])  # torch.Size.numel would fix a symbol
        with graph.inserting_before(node):
            fewer = fake_value(node).view(tokens, -1)
            flat = insert_call(
                graph, torch.flatten, (source, 0, -2), like=node, value=fewer
            )
        node.target, node.op = torch.flatten, "call_function"
        node.args, node.kwargs = (flat,), {}


def _rewrite(
    graph: fx.Graph, seed: fx.Node, flows: Flows, attention: Set[fx.Node]
) -> bool:
    """Fold the dispatch that a seed is part of; tell whether there is one.

    attention: calls that are part of no dispatch. They would be where batch entries are
        the rows, as of a mask that is repeated for every head.
    """
    rows, checked, copies = _rows(seed), _check_experts(seed), spelled(seed) == "repeat"
    nodes = list(graph.nodes)
    assert rows is not None
    region = DispatchRegion(_tokens(rows), flows, RULES)
    try:
        region.grow(seed, nodes[nodes.index(seed) + 1 :])
        if not copies:
            need(any(map(_may_be_experts, region.row_arguments)))
        need(attention.isdisjoint(region.moved))
        call = region_call(region, "moe_dispatch")
    except NotByRows as problem:
        log.debug("%s is left as it is: %s", seed.name, problem)
        if checked is not None:
            checked.replace_all_uses_with(rows)
            graph.erase_node(checked)
        if is_symbol(region.tokens) and not copies:
            text = f"{seed.name} of {region.tokens} tokens is no part of such a call"
            raise LengthNotSymbolic(text) from problem
        return False
    write_region_call(call, seed)
    return True


def _check_experts(seed: fx.Node) -> fx.Node | None:
    """Insert a check of the numbers by which a call sorts, if only data tells them.

    They may be looked up by the ids of tokens.
    """
    rows = _rows(seed)
    assert rows is not None
    value = fake_value(rows)
    if spelled(seed) not in ("sort", "argsort") or value.is_floating_point():
        return None
    if not_negative(rows):
        return None
    with seed.graph.inserting_before(seed):
        checked = insert_call(
            seed.graph,
            torch.ops.cp.expert_numbers.default,
            (rows, where(seed)),
            like=seed,
            value=value,
        )
    seed.replace_input_with(rows, checked)
    return checked


def _may_be_experts(x: fx.Node) -> bool:
    """Tell whether a value may be the expert of each token."""
    return not fake_value(x).is_floating_point()


def _tokens(rows: fx.Node) -> Size:
    """Return the number of tokens: the rows of what was flattened to get `rows`."""
    tokens: Size
    x, tokens = rows, fake_value(rows).shape[0]
    while x.op in ("call_function", "call_method"):
        sources = [n for n in x.all_input_nodes if isinstance(fake_value(n), Tensor)]
        if len(sources) != 1:
            break
        (source,) = sources
        shape = fake_value(source).shape
        numel = fake_value(rows).numel()
        if fake_value(rows).ndim > 1 or not is_same(math.prod(shape), numel):
            break
        if len(shape) == 2:
            tokens = shape[0]
            break
        if len(shape) != 1:
            break
        x = source
    return tokens
