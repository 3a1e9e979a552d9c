"""Mistakes of the user reach the user of torch.compile with the fix in the text."""

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from cpcompile import errors
from cpcompile.errors import (
    DropoutError,
    InputError,
    OptionError,
    RewriteError,
)
from cpcompile.frontend.local_view import local_cp
from tests.golden.capture import fake_group


@pytest.fixture(name="group")
def of_four() -> Iterator[None]:
    """Rank 1 of a group of four that exchanges nothing."""
    with fake_group(1, 4):
        yield


def mesh(shape=(4,), names=("cp",)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def double(x):
    return 2 * x


def message(fn, *args, **options):
    """The first paragraph; the rest is Dynamo's."""
    compiled = torch.compile(fn, backend="cp", fullgraph=True, options=options)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(*args)
    return str(caught.value).split("\n\n")[0]


def test_families():
    """All end in Error and share a base, beside the one of Python that people catch."""
    of_values = (OptionError, InputError)
    classes = [x for x in vars(errors).values() if isinstance(x, type)]
    own = [x for x in classes if x.__module__ == "cpcompile.errors"]
    assert len(own) > 8 and issubclass(DropoutError, RewriteError)
    for each in own:
        assert each.__name__.endswith("Error") and issubclass(each, errors.CPError)
        if each is not errors.CPError:
            assert issubclass(each, ValueError if each in of_values else RuntimeError)


def test_no_process_group():
    assert not dist.is_initialized()
    assert message(double, torch.ones(2)) == (
        "backend='cp' raised:\nInputError: backend=\"cp\" needs a process group, and "
        "there is none: start the program with torchrun and call "
        "torch.distributed.init_process_group() first"
    )


def dropped(x):
    return F.scaled_dot_product_attention(2 * x, 3 * x, x, dropout_p=1.0)


def on_two_meshes():
    both = mesh(), mesh((2, 2), ("dp", "cp"))
    inputs = (cp.shard(torch.ones(8), x, 0) for x in both)
    return message(lambda x, y: (2 * x, 2 * y), *inputs)


X, SHARD = torch.ones(8), {"x": 0}
NAMED = (
    'name it in init_device_mesh(..., mesh_dim_names=(..., "{}")) or pass the name of '
    "the axis that shards the sequence"
)
# what is called, and all of the message after "raised:", or a part of it
MISTAKES = {
    "nothing says what to shard": (
        lambda: message(double, X),
        'InputError: backend="cp" compiles double, and nothing says what to shard; '
        "needed DTensor inputs (cp.shard(x, mesh, dim)) or "
        'options={"mesh": mesh, "shard": {"argument name": dim}}',
    ),
    "shard without a mesh": (
        lambda: message(double, X, shard=SHARD),
        "nothing says what to shard",
    ),
    "no such axis": (
        lambda: message(double, X, mesh=mesh(), axis="sp", shard=SHARD),
        "InputError: mesh of shape (4,) has the axes cp; needed an axis 'sp': "
        f"{NAMED.format('sp')}",
    ),
    "no such axis of two": (
        lambda: message(double, X, mesh=mesh((2, 2), ("dp", "sp")), shard=SHARD),
        "InputError: mesh of shape (2, 2) has the axes dp, sp; needed an axis 'cp': "
        f"{NAMED.format('cp')}",
    ),
    "no names of axes": (
        lambda: message(double, X, mesh=mesh((2, 2), None), shard=SHARD),
        "mesh of shape (2, 2) has no axis names; needed an axis 'cp'",
    ),
    "sharded inputs without the axis": (
        lambda: message(double, cp.shard(X, mesh(), 0), axis="sp"),
        "InputError: the inputs of double are DTensors on the axes ['cp'], none of "
        "which is 'sp'; needed a mesh with that axis: options={'mesh': mesh}, or the "
        "name of the axis that shards the sequence",
    ),
    "inputs on two meshes": (on_two_meshes, "the inputs are DTensors on 2 meshes: "),
    "unknown option": (
        lambda: message(double, X, mesh=mesh(), shards=SHARD),
        "OptionError: unknown option 'shards' of backend=\"cp\"; did you mean 'shard'? "
        "The options are: activation_memory, axis, grad_sync, inner, layout, mesh, "
        "shard, strategy, strict, tile.",
    ),
    "a dropout probability of one": (
        lambda: message(dropped, torch.ones(1, 2, 8, 4), mesh=mesh(), shard={"x": 2}),
        "RewriteError: attention at <top level> (node scaled_dot_product_attention): "
        "got dropout_p=1.0; needed a probability in [0, 1)",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", MISTAKES)
def test_the_text_has_the_fix(name):
    call, text = MISTAKES[name]
    message = call()
    whole = re.match(r"\w+Error: ", text)
    assert message == f"backend='cp' raised:\n{text}" if whole else text in message


MESH_AXES = {"dp": 2, "cp": 2}


class Block(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + 1 if bias is None else x + bias


class Nothing(nn.Module):
    def forward(self) -> None: ...


def style_refused(text: str):
    return pytest.raises(InputError, match=re.escape(f"cp.ContextParallel: {text}"))


def test_options_that_follow_from_the_mesh(mesh) -> None:
    with style_refused(
        "got the options ['axis', 'shard'], which follow from the mesh and"
    ):
        cp.ContextParallel(options={"axis": "cp", "shard": {}, "strict": True})
    with pytest.raises(OptionError, match="unknown option 'strategie'"):
        cp.ContextParallel(options={"strategie": "ring"})
    compiled = torch.compile(Block(), backend=local_cp)
    with pytest.raises(Exception, match="nothing says what to shard"):
        compiled(torch.zeros(1, 8, 4))
    compiled = torch.compile(Block(), backend=local_cp, options={"mesh": mesh})
    with pytest.raises(Exception, match=r"forward is compiled by cp\.ContextParallel"):
        compiled(torch.zeros(1, 8, 4))


def test_names_that_no_argument_has(mesh) -> None:
    for module, of, shard, text in (
        (Block(), mesh, None, "a mesh of 2 axes ('dp', 'cp'); needed one axis: mesh"),
        (
            *(Block(), mesh["cp"], {"x": 1, "y": 1}),
            "shard names ['y'], and Block.forward has the arguments ['x', 'bias']",
        ),
        (
            *(Nothing(), mesh["cp"], None),
            "Nothing.forward takes no argument; needed one with tokens",
        ),
    ):
        style = cp.ContextParallel(shard) if shard else cp.ContextParallel()
        text = text if of is not mesh else f'got {text}["cp"]'
        with style_refused(text):
            style._apply(module, of)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    names = list(layer.state_dict())
    parallelize_module(layer, mesh["cp"], cp.ContextParallel({"src": 1}))
    assert list(layer.state_dict()) == names


def test_tokens_that_shard_batch_did_not_make(mesh) -> None:
    block = parallelize_module(Block(), mesh["cp"], cp.ContextParallel())
    with style_refused(
        "argument 'x' of Block: got no batch of cp.shard_batch before it; needed plain "
        "tensors of this rank's tokens: batch = cp.shard_batch(batch, mesh)"
    ):
        block(torch.zeros(1, 8, 4))
    cp.shard_batch(torch.zeros(1, 7), mesh)
    with style_refused(
        "argument 'x' of Block: got 7 tokens in dimension 1 of [1, 7, 4]; needed 3, "
        "this rank's of the 7 of the last batch: batch = cp.shard_batch(batch, mesh)"
    ):
        block(torch.zeros(1, 7, 4))
    with style_refused("argument 'x' of Block: got a DTensor; needed plain tensors"):
        block(cp.shard(torch.zeros(1, 7, 4), mesh["cp"], 1))
