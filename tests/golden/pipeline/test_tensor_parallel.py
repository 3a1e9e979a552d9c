"""Graphs of modules that parallelize_module has made tensor parallel."""

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

from cpcompile.options import GradSync
from cpcompile.passes.graph.context import InputKind
from cpcompile.torch_patches import dead_collectives
from tests.golden.capture import capture, fake_group
from tests.golden.golden_text import assert_golden, bare_calls, lines_with

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
    """`middle` is between the embedding and the layer."""

    def __init__(self, middle=lambda x: x):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 8), Layer()
        self.middle = middle

    def forward(self, ids):
        return self.layer(self.middle(self.embedding(ids))).mean(-1)


WITH_EMBEDDING = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    **{f"layer.{name}": style for name, style in TOKENS.items()},
}


def captured(mesh, middle=lambda x: x, **options):
    model = parallelize_module(Model(middle), mesh["tp"], WITH_EMBEDDING)
    ids = torch.randint(16, (2, 8))
    return capture(model, ids, mesh=mesh, strategy="ring", **options)


def test_heads_are_sharded_over_tp(mesh):
    layer = parallelize_module(Layer(), mesh["tp"], HEADS)
    x = torch.randn(2, 8, 8)
    found = capture(layer, x, mesh=mesh, strategy="ring", shard={"x": 1})
    moves = ("cp_tp", "linear", "= cp_replicate(", "= add(")
    assert_golden(
        lines_with(bare_calls(found.text), *moves),
        """\
cp_replicate = cp_replicate(l_self_modules_norm_parameters_weight_)
cp_tp_enter = cp_tp_enter(l_self_modules_inner_parameters_weight_, (S(0),), (8, 8),
    (8, 1), 0)
cp_tp_enter_1 = cp_tp_enter(l_self_modules_out_parameters_weight_, (S(1),), (8, 8),
    (8, 1), 0)
cp_tp_lift = cp_tp_lift(input_tensor, (R,))
linear = linear(cp_tp_lift, cp_tp_enter, None)
cp_tp_move = cp_tp_move(linear, (S(2),))
cp_tp_lower = cp_tp_lower(cp_tp_move, None)
unflatten = .unflatten(cp_tp_lower, -1, (-1, 2))
cp_tp_lift_1 = cp_tp_lift(input_tensor_2, (S(2),))
linear_1 = linear(cp_tp_lift_1, cp_tp_enter_1, None)
cp_tp_move_1 = cp_tp_move(linear_1, (R,))
cp_tp_lower_1 = cp_tp_lower(cp_tp_move_1, None)
add = add(cp_shard, cp_tp_lower_1)""",
    )
    kinds = Counter(x.kind for x in found.ctx.inputs.values())
    assert kinds[InputKind.OTHER_AXES] == 2


MOVES = (
    "cp_tp_lift(",
    "cp_tp_move(",
    "cp_tp_lower(",
    "cp_tp_regular(",
    " add(",
    "norm(",
)


def test_tokens_stay_in_the_chunks_of_tp(mesh):
    """Neither the residual nor the norm brings them to another order."""
    assert_golden(
        captured(mesh).lines(*MOVES),
        """\
cp_tp_lift = cp_tp_lift(l_ids_, (R,))  # [2, 8] R,R
cp_tp_move = cp_tp_move(embedding, (S(1),))  # [2, 8, 8] S(1),S(1)
hook_result_1 = rms_norm(cp_tp_move, (8,), cp_tp_enter_1, None)  # [2, 8, 8] S(1),S(1)
cp_tp_move_1 = cp_tp_move(hook_result_1, (R,))  # [2, 8, 8] S(1),R
cp_tp_move_2 = cp_tp_move(linear, (S(2),))  # [2, 8, 8] S(1),S(2)
cp_tp_lower = cp_tp_lower(cp_tp_move_2, None)  # [2, 8, 4] S(1)
cp_tp_lift_1 = cp_tp_lift(input_tensor_2, (S(2),))  # [2, 8, 8] S(1),S(2)
cp_tp_move_3 = cp_tp_move(linear_1, (S(1),))  # [2, 8, 8] S(1),S(1)
add = add(cp_tp_move, cp_tp_move_3)  # [2, 8, 8] S(1),S(1)
cp_tp_regular = cp_tp_regular(mean)  # [2, 4] R""",
    )


def test_a_call_that_mixes_tokens_gets_them_in_order(mesh):
    found = captured(mesh, lambda x: x + x.cumsum(1))
    assert_golden(
        found.lines("cumsum", "regular(", "= add(", "cp_place"),
        """\
cp_tp_regular = cp_tp_regular(cp_tp_move)  # [2, 4, 8] R
cumsum = .cumsum(cp_tp_regular, 1)  # [2, 4, 8] R
cp_shard_1 = cp_shard(cumsum, 1)  # [2, 4, 8] S(1)
cp_tp_regular_1 = cp_tp_regular(cp_tp_move)  # [2, 4, 8] R
input_tensor_1 = add(cp_tp_regular_1, cp_shard_1)  # [2, 4, 8] S(1)
cp_place = cp_place(input_tensor_1, (R,))  # [2, 4, 8] R
cp_tp_lift_1 = cp_tp_lift(cp_place, (S(1),))  # [2, 8, 8] R,S(1)
cp_tp_regular_2 = cp_tp_regular(cp_tp_move_3)  # [2, 4, 8] R
add_1 = add(input_tensor_1, cp_tp_regular_2)  # [2, 4, 8] S(1)""",
    )


def test_chunks_are_laid_out_with_the_rest_or_not_at_all(mesh):
    """The results leave in order, so that the chunks that they come from stay so."""
    found = captured(mesh, layout="zigzag")
    assert "zigzag scale=" in found.text
    assert found.text.count("cp.relayout(") == 2  # of the one operand, and back


def scaled(x):
    y = x + 1  # torch lets nobody write to what to_local returns
    y *= 2.0
    return y


def test_a_write_is_made_on_the_chunks(mesh):
    found = captured(mesh, scaled)
    assert found.text.count("= cp_tp_regular(") == 1  # the results
    assert ", imul, 2)" in found.text


def test_gradients_may_stay_shares(mesh):
    found = captured(mesh, grad_sync="none")
    given = [x for x in found.ctx.inputs.values() if x.kind is InputKind.OTHER_AXES]
    assert {x.gradient for x in given} == {GradSync.NONE}
    assert found.lines("cp_tp_enter").count(", 1)  #") == len(given) == 4


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


def test_meshes_that_are_not_of_one(mesh):
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    layer = parallelize_module(Layer(), other, HEADS)
    compiled = torch.compile(layer, backend="cp", options={"mesh": mesh})
    with pytest.raises(BackendCompilerFailed, match="needed two axes of one mesh"):
        compiled(torch.randn(2, 8, 8))


def test_no_axis_of_the_sequence(mesh):
    layer = parallelize_module(Layer(), mesh["tp"], HEADS)
    compiled = torch.compile(layer, backend="cp")
    with pytest.raises(
        BackendCompilerFailed, match=r"on the axes \['tp'\], none of which is 'cp'"
    ):
        compiled(torch.randn(2, 8, 8))


def test_a_parameter_on_the_axis_of_the_sequence(mesh):
    layer = parallelize_module(Layer(), mesh["tp"], HEADS)
    options = {"mesh": mesh, "axis": "tp"}
    compiled = torch.compile(layer, backend="cp", options=options)
    with pytest.raises(BackendCompilerFailed, match="includes the axis of the seq"):
        compiled(torch.randn(2, 8, 8))


class Local(nn.Module):
    """Attention, and what `function` makes of its result as a DTensor on tp."""

    def __init__(self, mesh, function):
        super().__init__()
        self.layer = parallelize_module(Layer(), mesh["tp"], HEADS)
        self.mesh, self.function = mesh["tp"], function

    def forward(self, x):
        return self.function(self.layer(x), self.mesh)


def partial_gradient(x, mesh):
    whole = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    return whole.to_local(grad_placements=(Partial(),))


def test_gradients_that_the_user_places(mesh):
    """What a rank of tp has is a summand, so that it is summed before the layer."""
    model = Local(mesh, partial_gradient)
    x = torch.randn(2, 8, 8, requires_grad=True)
    options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 1}}
    group = mesh["tp"].get_group().group_name
    compiled = torch.compile(model, backend="cp", options=options)
    with_it = collectives(compiled, x)["all_reduce", group]
    torch._dynamo.reset()
    model.function = lambda x, mesh: x
    assert with_it == collectives(compiled, x)["all_reduce", group] + 1


def shaped(x, mesh):
    layout = {"shape": torch.Size((2, 8, 8)), "stride": (64, 8, 1)}
    return DTensor.from_local(x, mesh, (Replicate(),), run_check=False, **layout)


def test_a_global_shape_is_refused(mesh):
    options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 1}}
    compiled = torch.compile(Local(mesh, shaped), backend="cp", options=options)
    text = r"is given \['shape', 'stride'\]; needed these arguments alone"
    with pytest.raises(BackendCompilerFailed, match=text):
        compiled(torch.randn(2, 8, 8))


def test_gradients_of_chunks_that_the_user_places(mesh):
    def middle(x):
        tokens = DTensor.from_local(x, mesh["tp"], (Shard(1),), run_check=False)
        return tokens.to_local(grad_placements=(Partial(),))

    assert "leave grad_placements away" in str(captured(mesh, middle).error)
