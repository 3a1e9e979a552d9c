"""Graphs of modules whose parameters cp.shard_parameters has sharded."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.errors import InputError, RewriteError
from cpcompile.torch_patches import dead_collectives
from tests.golden.capture import capture, fake_mesh
from tests.golden.golden_text import assert_golden, golden_text, lines_with

MESH_AXES = {"dp": 2, "cp": 2}


class Layer(nn.Module):
    def __init__(self, reads=lambda self, x: x):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.reads = reads

    def forward(self, x):
        y = self.inner(x).unflatten(-1, (-1, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return self.reads(self, x + y.transpose(1, 2).flatten(2) * self.scale)


def captured(mesh, model, sharding=None, **options):
    cp.shard_parameters(model, mesh, **(sharding or {}))
    x = torch.randn(2, 8, 8)
    return capture(model, x, mesh=mesh, strategy="ring", **options)


def test_parameters_are_gathered_where_they_are_read(mesh):
    """In regions inside, so that the backward gathers again."""
    layer = Layer()

    def fn(x):
        return checkpoint(layer, x, use_reentrant=False)

    cp.shard_parameters(layer, mesh, param_dtype=torch.bfloat16)
    x = torch.randn(2, 8, 8, dtype=torch.bfloat16)
    found = capture(fn, x, mesh=mesh, strategy="ring", shard={"x": 1})
    assert_golden(
        found.lines("gather_parameter", "checkpoint("),
        """\
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0,
    l_layer_modules_inner_parameters_weight_, l_x_, l_layer_parameters_scale_,
    use_reentrant=False)
    whole_parameter = cp_gather_parameter(l_layer_modules_inner_parameters_weight_,
        (S(0),), (8, 8), (8, 1), torch.bfloat16, None)  # [8, 8]
    whole_parameter_1 = cp_gather_parameter(l_layer_parameters_scale_, (R,), (), (),
        torch.bfloat16, None)  # []""",
    )


def sent(mesh, **sharding):
    """The collectives of the compiled forward and backward, and what each is of."""
    layer = cp.shard_parameters(Layer(), mesh, **sharding)
    options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 1}}
    compiled = torch.compile(layer, backend="cp", options=options)
    with dead_collectives.partitions() as graphs:
        compiled(torch.randn(2, 8, 8, requires_grad=True)).sum().backward()
    ((forward, backward),) = graphs
    texts = [f"{golden_text(x.graph)}\n---" for x in (forward, backward)]
    words = ("functional.all_", "functional.reduce", "---", ", 2)")
    text = lines_with("\n".join(texts), *words)
    return re.sub(r"\w+ = _c10d_functional.|_into_tensor|, reduce_op='sum'", "", text)


def test_what_is_sent(mesh):
    """The backward gathers again, unless what was gathered is kept."""
    again, kept = sent(mesh), sent(mesh, reshard_after_forward=False)
    assert_golden(
        again,
        """\
all_gather(primals_1, group_size=4, group_name='0')
all_gather(add_8, group_size=2, group_name='3')
---
all_gather(primals_1, group_size=4, group_name='0')
mul_11 = aten.mul.Tensor(sum_3, 2)
all_reduce(mul_11, group_name='0')
mul_12 = aten.mul.Tensor(t_8, 2)
reduce_scatter_tensor(mul_12, group_size=4, group_name='0')
all_gather(add_11, group_size=2, group_name='3')
---""",
    )
    lines = again.splitlines()
    assert "all_gather(primals_1" in lines.pop(lines.index("---") + 1)
    assert kept.splitlines() == lines


def test_a_parameter_that_is_read_otherwise_is_refused(mesh):
    model = Layer(lambda self, x: x + next(self.inner.parameters()).to_local().sum())
    with pytest.raises(RewriteError, match=r"needed module\.name, which is the whole"):
        captured(mesh, model, shard={"x": 1})


def with_gradient(mesh):
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.zeros(4, 4)
    return layer


def linear(mesh):
    return nn.Linear(4, 4)


def of_tensor_parallelism(mesh):
    return parallelize_module(nn.Linear(4, 4), mesh["cp"], ColwiseParallel())


REFUSED = [
    (lambda mesh: nn.GRU(4, 4), {}, "keeps a list of its parameters"),
    (with_gradient, {}, "weight of the module (Linear) has a gradient"),
    (of_tensor_parallelism, {}, "is a DTensor on the axes ('cp',)"),
    (
        lambda mesh: cp.shard_parameters(linear(mesh), mesh),
        {},
        "is a DTensor on the axes ('dp_cp',)",
    ),
    (linear, {"axes": ("cp", "dp")}, "in their order"),
    (linear, {"axes": "tp"}, "needed an axis 'tp'"),
    (linear, {"axes": ()}, "needed some of these"),
]


@pytest.mark.parametrize(("make", "given", "text"), REFUSED)
def test_what_cannot_be_sharded(mesh, make, given, text):
    module = make(mesh)
    with pytest.raises(InputError, match=re.escape(text)):
        cp.shard_parameters(module, mesh, **given)


def test_a_cut_through_the_ranks_of_a_sequence_is_refused():
    """Gradients would be averaged over some of its ranks only."""
    with fake_mesh(2, 2, names=("cp", "other")) as mesh:
        layer = cp.shard_parameters(Layer(), mesh, axes="other")
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        with pytest.raises(InputError, match="needed all of these among"):
            capture(layer, torch.randn(2, 8, 8), mesh=whole, shard={"x": 1})


def test_classes_are_shared_and_names_stay(mesh):
    """Dynamo compiles the code of layers once, and checkpoints fit."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    names = list(model.state_dict())
    cp.shard_parameters(model, mesh)
    assert list(model.state_dict()) == names
    assert type(model[0]) is type(model[1]) is not type(model[2])
    assert isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear"
