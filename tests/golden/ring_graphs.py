"""Graphs of one attention, as AOTAutograd makes them, and the pass expand_ring."""

from __future__ import annotations

from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile import backend
from cpcompile.passes.expand_ring import expand_ring
from tests.golden.capture import fake_group

SHIFT = torch.ops.cp.ring_shift.default


def traced(
    *place: int,
    seq: int = 16,
    causal: bool = True,
    kv_heads: int = 2,
    layers: int = 1,
    strategy: str = "ring",
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of forward and backward that AOTAutograd hands to Inductor.

    `place` is the rank and the number of ranks, (1, 2) unless given.
    """
    rank, ranks = place or (1, 2)
    graphs = {}

    def keep(name):
        def compiler(gm, _):
            graphs[name] = gm.graph
            return make_boxed_func(gm.forward)

        return compiler

    def attend(q, k, v):
        for _ in range(layers):
            q = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=kv_heads != 2
            )
        return q

    inner = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    options = {"inner": "aot_eager", "strategy": strategy}
    with (
        fake_group(rank, ranks),
        mock.patch.object(backend, "lookup_backend", lambda _: inner),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        qkv = (
            cp.shard(torch.randn(1, heads, seq, 4), mesh, 2).requires_grad_()
            for heads in (2, kv_heads, kv_heads)
        )
        step = torch.compile(attend, backend="cp", fullgraph=True, options=options)
        step(*qkv).sum().backward()
    return graphs["forward"], graphs["backward"]


def expand(
    graph: fx.Graph, *place: int, limit: int | None = 8, kernel: str = "auto"
) -> int:
    """Run the pass on a rank, `place` is that of `traced`; returns its count."""
    with fake_group(*(place or (1, 2))):
        count = expand_ring(graph, limit, lambda node: kernel)
    graph.lint()
    return count
