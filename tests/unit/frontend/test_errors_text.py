"""Mistakes of the user reach the user of torch.compile with the fix in the text."""

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cpcompile as cp
from cpcompile import errors
from cpcompile.errors import (
    DropoutError,
    InputError,
    OptionError,
    RewriteError,
)
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


def masked(x, mask, is_causal=False):
    return F.scaled_dot_product_attention(
        2 * x, 3 * x, x, attn_mask=mask, is_causal=is_causal
    )


@pytest.mark.usefixtures("group")
def test_two_masks_in_strict_mode():
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
    options = {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))}
    assert message(both, x, mask, shard={"x": 2}, **options) == (
        "backend='cp' raised:\nRewriteError: attention at <top level> (node "
        "scaled_dot_product_attention): got attn_mask and is_causal=True, of which "
        "torch's kernels use both, or refuse them; needed one: write the causal limit "
        "into the mask"
    )
