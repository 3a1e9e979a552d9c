"""Mistakes of the user reach the user of torch.compile with the fix in the text."""

import re
from collections.abc import Iterator
from textwrap import fill

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import cpcompile as cp
from cpcompile import errors
from cpcompile.errors import (
    BufferChangedError,
    DropoutError,
    InputError,
    OptionError,
    RankMismatchError,
    RecompileLimitError,
    RewriteError,
    RingOverlapError,
)


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Rank 1 of a group of four that exchanges nothing."""
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def mesh(fake_group: None) -> DeviceMesh:
    """A mesh (cp=4)."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))


def double(x):
    return 2 * x


def message(fn, *args, **options):
    """The first paragraph; the rest is Dynamo's."""
    compiled = torch.compile(fn, backend="cp", fullgraph=True, options=options)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(*args)
    return str(caught.value).split("\n\n")[0]


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (OptionError, ValueError),
        (InputError, ValueError),
        (RankMismatchError, RuntimeError),
        (RewriteError, RuntimeError),
        (DropoutError, RewriteError),
        (RingOverlapError, RuntimeError),
        (BufferChangedError, RuntimeError),
        (RecompileLimitError, RuntimeError),
    ],
)
def test_families(error, base):
    assert issubclass(error, base)


def test_no_process_group():
    assert not dist.is_initialized()
    assert_expected_inline(
        fill(message(double, torch.ones(2)), 80),
        """\
backend='cp' raised: InputError: backend="cp" needs a process group, and there
is none: start the program with torchrun and call
torch.distributed.init_process_group() first""",
    )


def test_nothing_says_what_to_shard(fake_group):
    assert_expected_inline(
        fill(message(double, torch.ones(2)), 80),
        """\
backend='cp' raised: InputError: backend="cp" compiles double, and nothing says
what to shard; needed DTensor inputs (cp.shard(x, mesh, dim)) or
options={"mesh": mesh, "shard": {"argument name": dim}}""",
    )


def test_shard_without_a_mesh(fake_group):
    text = message(double, torch.ones(2), shard={"x": 0})
    assert "nothing says what to shard" in text


def test_mesh_without_the_axis(mesh):
    text = message(double, torch.ones(8), mesh=mesh, axis="sp", shard={"x": 0})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: mesh of shape (4,) has the axes cp; needed an
axis 'sp': name it in init_device_mesh(..., mesh_dim_names=(..., "sp")) or pass
the name of the axis that shards the sequence""",
    )


def test_mesh_of_two_axes_without_the_axis(fake_group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    text = message(double, torch.ones(8), mesh=mesh, shard={"x": 0})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: mesh of shape (2, 2) has the axes dp, sp;
needed an axis 'cp': name it in init_device_mesh(..., mesh_dim_names=(...,
"cp")) or pass the name of the axis that shards the sequence""",
    )


def test_mesh_of_two_axes_without_names(fake_group):
    mesh = init_device_mesh("cpu", (2, 2))
    text = message(double, torch.ones(8), mesh=mesh, shard={"x": 0})
    assert "mesh of shape (2, 2) has no axis names; needed an axis 'cp'" in text


def test_sharded_inputs_without_the_axis(mesh):
    x = cp.shard(torch.ones(8), mesh, 0)
    assert_expected_inline(
        fill(message(double, x, axis="sp"), 80),
        """\
backend='cp' raised: InputError: the inputs of double are DTensors on the axes
['cp'], none of which is 'sp'; needed a mesh with that axis: options={'mesh':
mesh}, or the name of the axis that shards the sequence""",
    )


def test_inputs_on_two_meshes(fake_group):
    first = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inputs = cp.shard(torch.ones(8), first, 0), cp.shard(torch.ones(8), second, 0)
    text = message(lambda x, y: (2 * x, 2 * y), *inputs)
    assert "InputError: the inputs are DTensors on 2 meshes: " in text


def test_dim_out_of_range(mesh):
    text = message(double, torch.ones(8), mesh=mesh, shard={"x": 1})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: InputError: options['shard']['x']: got dim 1 for a tensor
of shape (8,); needed a dimension from -1 to 0""",
    )


def test_unknown_option(mesh):
    text = message(double, torch.ones(8), mesh=mesh, shards={"x": 0})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: OptionError: unknown option 'shards' of backend="cp"; did
you mean 'shard'? The options are: activation_memory, axis, grad_sync, inner,
layout, mesh, shard, strategy, strict, tile.""",
    )


def masked(x, mask, is_causal=False):
    return F.scaled_dot_product_attention(
        2 * x, 3 * x, x, attn_mask=mask, is_causal=is_causal
    )


def test_two_masks_in_strict_mode(mesh):
    def both(x, mask):
        return masked(x, mask, is_causal=True)

    x, mask = torch.ones(1, 2, 8, 4), torch.ones(8, 8, dtype=torch.bool)
    try:
        both(x, mask)
    except RuntimeError as error:  # torch 2.15 refuses it by itself, Dynamo too
        compiled = torch.compile(both, backend="cp", fullgraph=True)
        with pytest.raises(TorchRuntimeError, match=re.escape(str(error))):
            compiled(x, mask)
        return
    text = message(both, x, mask, mesh=mesh, shard={"x": 2})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: RewriteError: attention at <top level> (node
scaled_dot_product_attention): got attn_mask and is_causal=True, of which
torch's kernels use both, or refuse them; needed one: write the causal limit
into the mask""",
    )


def test_a_dropout_probability_of_one(mesh):
    def dropped(x):
        return F.scaled_dot_product_attention(2 * x, 3 * x, x, dropout_p=1.0)

    text = message(dropped, torch.ones(1, 2, 8, 4), mesh=mesh, shard={"x": 2})
    assert_expected_inline(
        fill(text, 80),
        """\
backend='cp' raised: RewriteError: attention at <top level> (node
scaled_dot_product_attention): got dropout_p=1.0; needed a probability in [0, 1)""",
    )


def test_errors_end_in_error_and_share_a_base():
    classes = [x for x in vars(errors).values() if isinstance(x, type)]
    own = [x for x in classes if x.__module__ == "cpcompile.errors"]
    assert len(own) > 8
    for each in own:
        assert each.__name__.endswith("Error") and issubclass(each, errors.CPError)
