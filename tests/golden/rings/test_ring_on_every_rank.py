"""An unrolled ring has the same calls on every rank, and their metadata.

The rank is in the integers that limit a step, and at the end of the text of a shift.
"""

import copy
import itertools

import pytest
import torch.fx as fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from cpcompile.kernels import choice
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from cpcompile.passes.local.expand_ring import RINGS
from tests.golden.ring_graphs import SHIFT, expand, traced


def topology(graph):
    """The calls with their tensors; integers and the texts of `where` are left out."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    calls = []
    for node in graph.nodes:
        leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
        is_step = "attention_step" in str(node.target)
        calls.append(
            (
                str(node.target),
                [numbers[x] for x in leaves if isinstance(x, fx.Node)],
                [x for x in leaves if isinstance(x, bool | float)],
                [x for x in leaves if isinstance(x, str)] if is_step else [],
            )
        )
    return calls


CASES = [(5, None), *itertools.product((16, 14), (None, "ulysses", "ring"))]


@pytest.mark.parametrize(("seq", "inner"), CASES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_rank_has_the_same_calls(monkeypatch, causal, seq, inner):
    """14 tokens: 4, 4, 4, 2. 5 tokens: 2, 2, 1, 0. inner: of a hybrid."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    options = {"seq": seq, "causal": causal}
    options |= {} if inner is None else {"strategy": "hybrid", "inner": inner}
    graphs = [traced(rank, 4, **options) for rank in range(4)]
    ring = 4 if inner is None else 2
    for direction, kernel in itertools.product((0, 1), ("aten_flash", "triton")):
        found, wheres = [], []
        for rank in range(4):
            graph = copy.deepcopy(graphs[rank][direction])
            assert expand(graph, rank, 4, limit=ring, kernel=kernel, inner=inner) == 1
            found.append(topology(graph))
            shifts = graph.find_nodes(op="call_function", target=SHIFT)
            wheres.append([x.args[2].removesuffix(NOTHING_TO_HIDE_IT) for x in shifts])
        assert all(x == found[0] for x in found)
        assert all(x == wheres[0] for x in wheres)
        assert len(wheres[0]) == ring - 1 + ring * direction


@pytest.mark.parametrize("kernel", ["aten_flash", "triton"])
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_metadata(monkeypatch, kernel, direction):
    """Every new node has a value, and the user's line and module of the ring."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    graph = traced(kv_heads=1)[direction]
    (ring,) = (node for node in graph.nodes if node.target in RINGS)
    old, metadata = set(graph.nodes), dict(ring.meta)
    results = [node.meta["val"] for node in graph.output_node().args[0]]
    expand(graph, kernel=kernel)
    new = [node for node in graph.nodes if node not in old]
    assert len(new) > 5
    for node in new:
        for value in pytree.tree_leaves(node.meta["val"]):
            assert isinstance(value, FakeTensor)
            assert value.fake_mode is results[0].fake_mode
        for name in ("stack_trace", "seq_nr", "nn_module_stack"):
            assert node.meta.get(name) == metadata.get(name)
        assert node.meta["original_aten"] is not None
    assert "scaled_dot_product_attention" in metadata["stack_trace"]
    for node, value in zip(graph.output_node().args[0], results, strict=True):
        got = node.meta["val"]
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        assert got.stride() == value.stride()
