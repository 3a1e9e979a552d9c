"""Graphs of one attention, as AOTAutograd makes them, and the pass expand_ring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cpcompile as cp
from cpcompile.compile import inner_compilers
from cpcompile.passes.local.expand_ring import RINGS, Unrolling, expand_ring
from tests.golden.capture import fake_group
from tests.golden.golden_text import LOCAL_VIEWS, golden_text, lines_without

SHIFT = torch.ops.cp.ring_shift.default


def traced(
    *place: int,
    seq: int = 16,
    causal: bool = True,
    kv_heads: int = 2,
    layers: int = 1,
    strategy: str = "ring",
    inner: str | None = None,
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of forward and backward that AOTAutograd hands to Inductor.

    `place` is the rank and the number of ranks, (1, 2) unless given. `inner` is the
    group of consecutive ranks of a hybrid, whose mesh has two axes then.
    """
    rank, ranks = place or (1, 2)

    def attend(q, k, v):
        for _ in range(layers):
            q = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=kv_heads != 2
            )
        return q

    options = {"inner": "aot_eager", "strategy": strategy}
    with fake_group(rank, ranks), kept_graphs() as (graphs, _):
        mesh, axis = _mesh(ranks, inner)
        options["axis"] = axis
        qkv = (
            cp.shard(torch.randn(1, heads, seq, 4), mesh, 2, axis).requires_grad_()
            for heads in (2, kv_heads, kv_heads)
        )
        step = torch.compile(attend, backend="cp", fullgraph=True, options=options)
        step(*qkv).sum().backward()
    for graph in graphs:
        name_operands(graph)
    forward, backward = graphs
    return forward, backward


@contextmanager
def kept_graphs() -> Iterator[tuple[list[fx.Graph], Callable[..., Any]]]:
    """The graphs that a compiler gets, forward first, and a backend that keeps them.

    Those that backend="cp" hands to "aot_eager" are kept, too.
    """
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    with mock.patch.object(inner_compilers, "boxed_nop", keep):
        yield graphs, aot_autograd(fw_compiler=keep, bw_compiler=keep)


def name_operands(graph: fx.Graph) -> None:
    """Give inputs of the graph that a ring reads the names that it has for them."""
    for ring in (node for node in graph.nodes if node.target in RINGS):
        arguments = ring.target._schema.arguments
        for argument, operand in zip(arguments, ring.args, strict=False):
            while getattr(operand, "target", None) in LOCAL_VIEWS:
                operand = operand.args[0]
            if isinstance(operand, fx.Node) and operand.op == "placeholder":
                operand._rename(argument.name)


def _mesh(ranks: int, inner: str | None) -> tuple[DeviceMesh, str | tuple[str, ...]]:
    """The mesh of `traced`, and the axes that shard the sequence."""
    if inner is None:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), "cp"
    names = ("ring", "ulysses") if inner == "ulysses" else ("ulysses", "ring")
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names), names


def expand(
    graph: fx.Graph,
    *place: int,
    limit: int | None = 8,
    kernel: str = "auto",
    inner: str | None = None,
) -> int:
    """Run the pass on a rank, `place` is that of `traced`; returns its count."""
    rank, ranks = place or (1, 2)
    with fake_group(rank, ranks):
        _mesh(ranks, inner)  # its groups get the names that are in the graph
        count = expand_ring(graph, Unrolling(limit, lambda node: kernel))
    graph.lint()
    return count


def text(graph: fx.Graph) -> str:
    """The calls and the results; names and messages are shorter than in the graph."""
    text = re.sub(r" of the \w+ward of ring attention,", ",", golden_text(graph))
    text = re.sub(r"(?<!cp\.)\b(ring|attention)_(?=shift|wait|step)", "", text)
    return lines_without(text, " = input")


def brief(*graphs: fx.Graph) -> str:
    """Their texts, without what all calls have: the group, the scale and the kernel."""
    code = "\n---\n".join(map(text, graphs))
    code = re.sub(r",? (spec='scale=0.5'|kernel='\w+'|group=GROUP)(?=[,)])", "", code)
    return code.replace("_scaled_dot_product_flash_attention_for_cpu", "flash")
