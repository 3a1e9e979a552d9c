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
from tests.golden.capture import capture, fake_group
from tests.golden.golden_text import (
    assert_golden,
    bare_calls,
    golden_text,
    lines_with,
)


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


@pytest.fixture
def mesh():
    """Rank 1 of a mesh (dp=2, cp=2)."""
    torch.manual_seed(0)
    with fake_group(ranks=4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def captured(mesh, model, sharding=None, **options):
    cp.shard_parameters(model, mesh, **(sharding or {}))
    x = torch.randn(2, 8, 8)
    return capture(model, x, mesh=mesh, strategy="ring", **options)


def test_parameters_are_gathered_where_they_are_read(mesh):
    found = captured(mesh, Layer(), shard={"x": 1})
    assert_golden(
        bare_calls(found.text),
        """\
cp_shard = cp_shard(l_x_, 1)
whole_parameter = cp_gather_parameter(l_self_modules_inner_parameters_weight_, (S(0),),
    (8, 8), (8, 1), None, None)
cp_unreduced = cp_unreduced(whole_parameter, 2)
linear = linear(cp_shard, cp_unreduced, None)
unflatten = .unflatten(linear, -1, (-1, 2))
y = .transpose(unflatten, 1, 2)
ring_attention_default = cp.ring_attention(y, y, y, sizes=[8, 8],
    spec='causal scale=0.707107', group=GROUP)
getitem = ring_attention_default[0]
transpose_1 = .transpose(getitem, 1, 2)
flatten = .flatten(transpose_1, 2)
whole_parameter_1 = cp_gather_parameter(l_self_parameters_scale_, (R,), (), (), None,
    None)
cp_unreduced_1 = cp_unreduced(whole_parameter_1, 2)
mul = mul(flatten, cp_unreduced_1)
add = add(cp_shard, mul)
cp_gather = cp_gather(add)
return (cp_gather,)""",
    )


def test_regions_gather_inside(mesh):
    """So that the backward gathers again."""
    layer = Layer()

    def fn(x):
        return checkpoint(layer, x, use_reentrant=False)

    cp.shard_parameters(layer, mesh, param_dtype=torch.bfloat16)
    x = torch.randn(2, 8, 8, dtype=torch.bfloat16)
    found = capture(fn, x, mesh=mesh, strategy="ring", shard={"x": 1})
    assert_golden(
        found.lines("cp_gather", "unreduced", "checkpoint"),
        """\
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0,
    l_layer_modules_inner_parameters_weight_, cp_shard, l_layer_parameters_scale_,
    use_reentrant=False)
    whole_parameter = cp_gather_parameter(l_layer_modules_inner_parameters_weight_,
        (S(0),), (8, 8), (8, 1), torch.bfloat16, None)  # [8, 8]
    cp_unreduced = cp_unreduced(whole_parameter, 2)  # [8, 8] R
    linear = linear(l_x_, cp_unreduced, None)  # [2, 8, 8] S(1)
    whole_parameter_1 = cp_gather_parameter(l_layer_parameters_scale_, (R,), (), (),
        torch.bfloat16, None)  # []
    cp_unreduced_1 = cp_unreduced(whole_parameter_1, 2)  # [] R
    mul = mul(flatten, cp_unreduced_1)  # [2, 8, 8] S(1)
getitem = tag_activation_checkpoint[0]  # [2, 8, 8] S(1)
cp_gather = cp_gather(getitem)  # [2, 8, 8]
return (cp_gather,)""",
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
    return lines_with("\n".join(texts), "functional.all_", "functional.reduce", "---")


def test_the_backward_gathers_again(mesh):
    assert_golden(
        sent(mesh),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(primals_1,
    group_size=4, group_name='0')
all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor(add, group_size=2,
    group_name='3')
---
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(primals_1,
    group_size=4, group_name='0')
all_reduce = _c10d_functional.all_reduce(mul_3, reduce_op='sum', group_name='0')
reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor(mul_4, reduce_op='sum',
    group_size=4, group_name='0')
all_gather_into_tensor_2 = _c10d_functional.all_gather_into_tensor(add_3, group_size=2,
    group_name='3')
---""",
    )


def test_what_was_gathered_may_be_kept(mesh):
    assert_golden(
        sent(mesh, reshard_after_forward=False),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(primals_1,
    group_size=4, group_name='0')
all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor(add, group_size=2,
    group_name='3')
---
all_reduce = _c10d_functional.all_reduce(mul_3, reduce_op='sum', group_name='0')
reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor(mul_4, reduce_op='sum',
    group_size=4, group_name='0')
all_gather_into_tensor_2 = _c10d_functional.all_gather_into_tensor(add_3, group_size=2,
    group_name='3')
---""",
    )


def test_a_parameter_that_is_read_otherwise_is_refused(mesh):
    model = Layer(lambda self, x: x + next(self.inner.parameters()).to_local().sum())
    with pytest.raises(RewriteError, match=r"needed module\.name, which is the whole"):
        captured(mesh, model, shard={"x": 1})


def with_gradient(mesh):
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.zeros(4, 4)
    return layer


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (lambda mesh: nn.GRU(4, 4), {}, "keeps a list of its parameters"),
        (with_gradient, {}, "weight of the module (Linear) has a gradient"),
        (
            lambda mesh: parallelize_module(
                nn.Linear(4, 4), mesh["cp"], ColwiseParallel()
            ),
            {},
            "is a DTensor on the axes ('cp',)",
        ),
        (
            lambda mesh: cp.shard_parameters(nn.Linear(4, 4), mesh),
            {},
            "is a DTensor on the axes ('dp_cp',)",
        ),
        (lambda mesh: nn.Linear(4, 4), {"axes": ("cp", "dp")}, "in their order"),
        (lambda mesh: nn.Linear(4, 4), {"axes": "tp"}, "needed an axis 'tp'"),
        (lambda mesh: nn.Linear(4, 4), {"axes": ()}, "needed some of these"),
    ],
)
def test_what_cannot_be_sharded(mesh, make, given, text):
    module = make(mesh)
    with pytest.raises(InputError, match=re.escape(text)):
        cp.shard_parameters(module, mesh, **given)


def test_a_cut_through_the_ranks_of_a_sequence_is_refused():
    """Gradients would be averaged over some of its ranks only."""
    with fake_group(ranks=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "other"))
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
