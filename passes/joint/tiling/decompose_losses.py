"""Decompose losses in which tokens, and the mean over them, are one call of aten.

Inductor decomposes them by itself; this is for graphs that it does not see. The
gradient of such a sum is one number, expanded to all tokens and then split:

    getitem(split(expand(tangents_1, [1, S]), S/N, 1), r)
      ->  expand(tangents_1, [1, S/N])

for S tokens, N ranks and rank r. `tile_tokens` sees after this that it is one number.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.torch_private.operators import core_aten_decompositions

from ...graph.nodes import value_of
from .tile_program import copied
from .tile_regions import bytes_of

aten = torch.ops.aten
_LOSSES = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
)
_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", "recompute", "ac_graph_id")


def write_out_losses(graph: fx.Graph, least: int) -> None:
    """Decompose losses that read a value of `least` bytes or more, in place."""
    for target in _LOSSES:
        for node in graph.find_nodes(op="call_function", target=target):
            if max(map(bytes_of, node.all_input_nodes)) >= least:
                _write_out(node)


def _write_out(node: fx.Node) -> None:
    operands = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        tensor_of = dict(zip(operands, tensors, strict=True))
        target: Any = node.target
        return target(*fx.node.map_arg(node.args, tensor_of.__getitem__))

    values = [value_of(x) for x in operands]
    table: Any = core_aten_decompositions()
    traced = make_fx(call, decomposition_table=table)(*values)
    inputs = traced.graph.find_nodes(op="placeholder")
    copies = dict(zip(inputs, operands, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(traced.graph, copies)
    for copy in set(copies.values()) - set(operands):
        copy.meta.update({k: node.meta[k] for k in _INHERITED if k in node.meta})
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} is no item of {node}"
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def expand_parts(graph: fx.Graph) -> None:
    """Replace parts of expanded values, in place."""
    for split in list(graph.nodes):
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            continue
        source, _, dim = (*split.args, 0)[:3]
        if source.target is not aten.expand.default:
            continue
        number, sizes = source.args[:2]
        dim %= len(sizes)
        own = (1,) * (len(sizes) - value_of(number).dim()) + value_of(number).shape
        if own[dim] != 1:
            continue
        parts = list(split.users)
        if any(isinstance(value_of(x).shape[dim], torch.SymInt) for x in parts):
            continue  # no node has that size, and tiles are of no symbolic size
        for part in parts:
            part_sizes = [*sizes[:dim], value_of(part).shape[dim], *sizes[dim + 1 :]]
            with graph.inserting_before(part):
                args = (number, part_sizes)
                expanded = copied(graph, aten.expand.default, args, {}, source)
            part.replace_all_uses_with(expanded, propagate_meta=False)
            graph.erase_node(part)
        graph.erase_node(split)
