"""Names in options["shard"] find their arguments, however these are passed."""

import dataclasses
from collections.abc import Iterator
from textwrap import fill
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile.compile import attempts
from cpcompile.passes.graph.context import InputKind


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (cp=2) that exchanges nothing."""
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    dist.destroy_process_group()
    torch._dynamo.reset()


class _Found(Exception):
    """Ends a compilation once the inputs are known."""


def found(fn, mesh, shard, *args, **kwargs):
    """{graph input: dim} of the inputs that `shard` names, as the backend sees them."""
    contexts = []

    def keep(gm, _, ctx):
        contexts.append(ctx)
        raise _Found

    options = {"mesh": mesh, "shard": shard}
    compiled = torch.compile(fn, backend="cp", fullgraph=True, options=options)
    with (
        mock.patch.object(attempts, "run_passes", keep),
        pytest.raises(BackendCompilerFailed) as caught,
    ):
        compiled(*args, **kwargs)
    if not isinstance(caught.value.inner_exception, _Found):
        raise caught.value
    (ctx,) = contexts
    return {
        node.name.strip("_"): given.dim
        for node, given in ctx.inputs.items()
        if given.kind is InputKind.FULL
    }


def rejected(fn, mesh, shard, *args, **kwargs):
    """The message that reaches the user."""
    with pytest.raises(BackendCompilerFailed) as caught:
        found(fn, mesh, shard, *args, **kwargs)
    return str(caught.value).split("\n\n")[0]


def tensor():
    return torch.randn(2, 16)


class Inputs(NamedTuple):
    tokens: Tensor
    labels: Tensor


@dataclasses.dataclass
class Batch:
    tokens: Tensor
    labels: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, tokens, labels=None):
        return self.linear(tokens)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def double(tokens, labels=None):
    return 2 * tokens


def double_of_keywords(**kwargs):
    return 2 * kwargs["tokens"]


def double_of_item(batch):
    return 2 * batch["tokens"]


def double_of_attribute(batch):
    return 2 * batch.tokens


TOKENS = {"tokens": 1}


def test_positional(mesh):
    assert found(double, mesh, TOKENS, tensor()) == {"l_tokens": 1}


def test_keyword(mesh):
    assert found(double, mesh, TOKENS, tokens=tensor()) == {"l_tokens": 1}


def test_several(mesh):
    shard = {"b": -1, "a": 0}
    assert found(
        lambda a, b, c: a + b + c, mesh, shard, *(tensor() for _ in "abc")
    ) == {
        "l_a": 0,
        "l_b": 1,
    }


def test_collected_keywords(mesh):
    assert found(double_of_keywords, mesh, TOKENS, tokens=tensor()) == {
        "l_kwargs_tokens": 1
    }


def test_collected_arguments(mesh):
    assert found(lambda *args: 2 * args[1], mesh, {"1": 0}, tensor(), tensor()) == {
        "l_args_1": 0
    }


@pytest.mark.parametrize("name", ["tokens", "batch.tokens"])
def test_dict(mesh, name):
    batch = {"tokens": tensor()}
    assert found(double_of_item, mesh, {name: 1}, batch) == {"l_batch_tokens": 1}


@pytest.mark.parametrize("name", ["tokens", "batch.tokens"])
@pytest.mark.parametrize("kind", [Batch, Inputs])
def test_dataclass_and_namedtuple(mesh, kind, name):
    batch = kind(tensor(), tensor())
    assert found(double_of_attribute, mesh, {name: 1}, batch) == {"l_batch_tokens": 1}


def test_list(mesh):
    assert found(lambda xs: 2 * xs[0], mesh, {"xs.0": 1}, [tensor()]) == {"l_xs_0": 1}


@pytest.mark.parametrize("by_name", [False, True])
def test_module(mesh, by_name):
    if by_name:
        assert found(Model(), mesh, TOKENS, tokens=tensor()) == {"l_tokens": 1}
    else:
        assert found(Model(), mesh, TOKENS, tensor()) == {"l_tokens": 1}


def test_module_with_hooks(mesh):
    model = Model()
    model.register_forward_pre_hook(lambda module, args: None)
    assert found(model, mesh, TOKENS, tensor()) == {"l_tokens": 1}


def test_wrapper_with_keywords(mesh):
    wrapper = Wrapper(Model())
    assert found(wrapper, mesh, TOKENS, tokens=tensor()) == {"l_kwargs_tokens": 1}


def test_wrapper_with_positional_arguments(mesh):
    assert found(Wrapper(Model()), mesh, TOKENS, tensor()) == {"l_args_0": 1}


def test_module_of_torch(mesh):
    assert found(nn.Linear(16, 16), mesh, {"input": 1}, tensor()) == {"l_args_0": 1}


def test_an_argument_that_is_none_or_not_used_needs_no_input(mesh):
    shard = {"tokens": 1, "labels": 1}
    assert found(double, mesh, shard, tensor()) == {"l_tokens": 1}
    assert found(double, mesh, shard, tensor(), tensor()) == {"l_tokens": 1}


def test_a_name_that_matches_nothing(mesh):
    text = rejected(double, mesh, {"token": 1}, tensor(), tensor())
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: options['shard'] names 'token', and no argument
of double is called so; the tensors among its arguments are: labels, tokens""",
    )


def test_the_tensors_in_containers_are_listed(mesh):
    text = rejected(double_of_attribute, mesh, {"ids": 1}, Batch(tensor(), tensor()))
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: options['shard'] names 'ids', and no argument
of double_of_attribute is called so; the tensors among its arguments are:
batch.labels, batch.tokens""",
    )


def test_there_is_no_tensor_at_all(mesh):
    text = rejected(lambda n: torch.ones(n), mesh, {"ids": 1}, 3)
    assert text.endswith("the tensors among its arguments are: none")


def test_an_ambiguous_name(mesh):
    def add(a, b):
        return a["tokens"] + b["tokens"]

    batches = {"tokens": tensor()}, {"tokens": tensor()}
    text = rejected(add, mesh, TOKENS, *batches)
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: options['shard'] names 'tokens', and several
arguments are called so: a.tokens, b.tokens; needed one: use its dotted path""",
    )
    assert found(add, mesh, {"b.tokens": 1}, *batches) == {"l_b_tokens": 1}


def test_an_argument_of_the_name_of_a_dict_item(mesh):
    def add(tokens, batch):
        return tokens + batch["tokens"]

    inputs = tensor(), {"tokens": tensor()}
    assert found(add, mesh, TOKENS, *inputs) == {"l_tokens": 1}


def test_an_argument_of_the_name_of_a_buffer(mesh):
    """As the position_ids of many models."""

    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", tensor())

        def forward(self, tokens, positions=None):
            positions = self.positions if positions is None else positions
            return tokens + positions + self.positions

    shard = {"tokens": 1, "positions": 1}
    assert found(WithBuffer(), mesh, shard, tensor()) == {"l_tokens": 1}
    assert found(WithBuffer(), mesh, shard, tensor(), tensor()) == {
        "l_tokens": 1,
        "l_positions": 1,
    }


@pytest.mark.parametrize(("value", "kind"), [(3, "int"), ("x", "str"), ([1], "list")])
def test_a_name_of_what_is_no_tensor(mesh, value, kind):
    text = rejected(lambda x, n: 2 * x, mesh, {"n": 0}, tensor(), value)
    assert text.endswith(f"names 'n', and that is of type {kind}; needed a tensor")


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range(mesh, dim):
    text = rejected(double, mesh, {"tokens": dim}, tensor())
    assert text == (
        "backend='cp' raised:\nInputError: options['shard']['tokens']: got dim "
        f"{dim} for a tensor of shape (2, 16); needed a dimension from -2 to 1"
    )
