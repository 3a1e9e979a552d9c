"""Graphs of modules that parallelize_module has made tensor parallel."""

import re
from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cpcompile.torch_patches import dead_collectives
from tests.golden.capture import Local, fake_group, forget, localised
from tests.golden.golden_text import assert_golden

MESH_AXES = {"cp": 2, "tp": 2}
HEADS = {"inner": ColwiseParallel(), "out": RowwiseParallel()}
TOKENS = {
    "norm": SequenceParallel(),
    "inner": ColwiseParallel(input_layouts=Shard(1)),
    "out": RowwiseParallel(output_layouts=Shard(1)),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.inner, self.out = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.inner(self.norm(x)).unflatten(-1, (-1, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """`middle` is between the layers, where tokens are in the chunks of tp."""

    def __init__(self, middle=lambda x: x):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layer, self.other = Layer(), Layer()
        self.middle = middle

    def forward(self, ids):
        return self.head(self.other(self.middle(self.layer(self.embedding(ids)))))


WITH_EMBEDDING = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    **{f"layer.{name}": style for name, style in TOKENS.items()},
    **{f"other.{name}": style for name, style in TOKENS.items()},
}


def local(mesh, model, *inputs, plan=WITH_EMBEDDING, layout="contiguous", **options):
    """The graph of this rank; groups are called as their axes."""
    forget()
    parallelize_module(model, mesh["tp"], plan)
    inputs = inputs or (torch.randint(16, (2, 8)),)
    options |= {"mesh": mesh, "strategy": "ring", "layout": layout}
    found = localised(model, *inputs, **options)
    text = found.text
    for name in mesh.mesh_dim_names:
        group = mesh[name].get_group().group_name
        text = re.sub(rf"(group|group_name)='{group}'", name, text)
    return Local(text, found.report)


def messages(found):
    """The calls that send, with their axis, but those that sum gradients over cp."""
    call = re.compile(r" = (?:cp|_c10d_functional)\.(\w+)\(.*?, (cp|tp)\b")
    calls = (" ".join(x.groups()) for x in call.finditer(found.text))
    calls = (re.sub("(_into)?_tensor", "", x) for x in calls)
    return [x for x in calls if x != "all_reduce cp"]


def test_heads_are_sharded_over_tp(mesh):
    """Partial sums of heads are added up, and those of the gradient before them."""
    x = torch.randn(2, 8, 8)
    found = local(mesh, Layer(), x, plan=HEADS, shard={"x": 1})
    assert_golden(
        ", ".join(messages(found)),
        """\
ring_attention cp, all_reduce tp, ring_attention_backward cp, all_reduce tp, all_gather
    cp""",
    )


def scaled(x):
    y = x + 1  # torch lets nobody write to what to_local returns
    y *= 2.0
    return y


def test_tokens_stay_in_the_chunks_of_tp(mesh):
    """Neither residuals nor norms bring them in order: cp gathers the result alone.

    Nor in another layout, nor where they are written to.
    """
    found = messages(local(mesh, Model()))
    assert_golden(
        ", ".join(found),
        """\
reduce_scatter tp, all_gather tp, ring_attention cp, reduce_scatter tp, all_gather tp,
    ring_attention cp, reduce_scatter tp, all_gather tp, all_gather tp, reduce_scatter
    tp, all_gather tp, ring_attention_backward cp, reduce_scatter tp, all_gather tp,
    ring_attention_backward cp, reduce_scatter tp, all_gather tp, all_reduce tp,
    all_reduce tp, all_gather cp""",
    )
    assert messages(local(mesh, Model(), layout="zigzag")) == found
    assert messages(local(mesh, Model(scaled))) == found


def test_a_call_that_mixes_tokens_gets_them_in_order(mesh):
    """And so do the residual that is added to it, and the norm that follows."""
    text = local(mesh, Model(lambda x: x + x.cumsum(1))).text
    _, _, middle = text.partition("reduce_scatter_tensor_1 =")
    middle, _, _ = middle.partition("ring_attention")
    call = r" = \w+\.(add\.Tensor|all_gather|cumsum|mm)[\w.]*\(.*?(, cp|, tp)?\)$"
    calls = ["".join(x) for x in re.findall(call, middle, re.MULTILINE)]
    assert calls == [
        *("add.Tensor", "all_gather, tp", "all_gather, cp", "all_gather, cp", "cumsum"),
        *("add.Tensor", "all_gather, cp", "all_gather, tp", "mm"),
    ]


def test_gradients_may_stay_shares(mesh):
    found = local(mesh, Model(), grad_sync="none")
    (line,) = found.report.gradients
    assert line.startswith("gradients of 8 parameters: the share of each rank")
    assert not re.findall("all_reduce.* cp", found.text)


def collectives(compiled, *inputs):
    """By name and group, of the forward and the backward that are compiled."""
    with dead_collectives.partitions() as graphs:
        compiled(*inputs)
    found = Counter()
    for graph in (module.graph for pair in graphs for module in pair):
        for node in graph.nodes:
            name = str(node.target).removeprefix("_c10d_functional.").split(".")[0]
            if "c10d" in str(node.target) and name != "wait_tensor":
                found[name, node.args[-1]] += 1
    return found


def test_a_step_of_three_axes_with_fsdp():
    """dp x cp x tp on eight ranks: what a block sends, besides the ring's messages."""
    with fake_group(ranks=8):
        names = ("dp", "cp", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        layer = parallelize_module(Layer(), mesh["tp"], TOKENS)
        fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
        options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 1}}
        layer.compile(backend="cp", options=options)
        found = collectives(layer, torch.randn(2, 8, 8, requires_grad=True))
        groups = {name: mesh[name].get_group().group_name for name in names}
    tp = {name for name, group in found if group == groups["tp"]}
    cp = {name for name, group in found if group == groups["cp"]}
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= tp
    # FSDP sums gradients over cp; the ends of the block gather the sequence.
    assert "all_reduce" not in cp
    assert not [group for _, group in found if group == groups["dp"]]


REFUSED = {
    "other ranks": "needed two axes of one mesh",
    "no mesh of the sequence": r"on the axes \['tp'\], none of which is 'cp'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(mesh, name):
    every = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    tp = every if name == "other ranks" else mesh["tp"]
    options = {"mesh": None} if "no mesh" in name else {"mesh": mesh}
    layer = parallelize_module(Layer(), tp, HEADS)
    compiled = torch.compile(layer, backend="cp", options=options)
    with pytest.raises(BackendCompilerFailed, match=REFUSED[name]):
        compiled(torch.randn(2, 8, 8))


class PlacesGradients(nn.Module):
    """Attention, the gradient of whose result is said to be a summand."""

    def __init__(self, mesh):
        super().__init__()
        self.layer = parallelize_module(Layer(), mesh["tp"], HEADS)
        self.mesh, self.placement = mesh["tp"], Partial()

    def forward(self, x):
        y = self.layer(x)
        whole = DTensor.from_local(y, self.mesh, (Replicate(),), run_check=False)
        return whole.to_local(grad_placements=(self.placement,))


def test_gradients_that_the_user_places(mesh):
    """What a rank of tp has is a summand, so that it is summed before the layer."""
    model, x = PlacesGradients(mesh), torch.randn(2, 8, 8, requires_grad=True)
    options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 1}}
    group = mesh["tp"].get_group().group_name
    compiled = torch.compile(model, backend="cp", options=options)
    with_it = collectives(compiled, x)["all_reduce", group]
    torch._dynamo.reset()
    model.placement = Replicate()
    assert with_it == collectives(compiled, x)["all_reduce", group] + 1
