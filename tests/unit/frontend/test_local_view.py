"""cp.ContextParallel: what it refuses, and in which words."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from cpcompile.errors import InputError, OptionError
from cpcompile.frontend.local_view import local_cp

MESH_AXES = {"dp": 2, "cp": 2}


class Block(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + 1 if bias is None else x + bias


class Nothing(nn.Module):
    def forward(self) -> None: ...


def refused(text: str):
    return pytest.raises(InputError, match=re.escape(f"cp.ContextParallel: {text}"))


def test_options_that_follow_from_the_mesh() -> None:
    with refused("got the options ['axis', 'shard'], which follow from the mesh and"):
        cp.ContextParallel(options={"axis": "cp", "shard": {}, "strict": True})
    with pytest.raises(OptionError, match="unknown option 'strategie'"):
        cp.ContextParallel(options={"strategie": "ring"})


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
        with refused(text):
            style._apply(module, of)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    names = list(layer.state_dict())
    parallelize_module(layer, mesh["cp"], cp.ContextParallel({"src": 1}))
    assert list(layer.state_dict()) == names


def test_tokens_that_shard_batch_did_not_make(mesh) -> None:
    block = parallelize_module(Block(), mesh["cp"], cp.ContextParallel())
    with refused(
        "argument 'x' of Block: got no batch of cp.shard_batch before it; needed plain "
        "tensors of this rank's tokens: batch = cp.shard_batch(batch, mesh)"
    ):
        block(torch.zeros(1, 8, 4))
    cp.shard_batch(torch.zeros(1, 7), mesh)
    with refused(
        "argument 'x' of Block: got 7 tokens in dimension 1 of [1, 7, 4]; needed 3, "
        "this rank's of the 7 of the last batch: batch = cp.shard_batch(batch, mesh)"
    ):
        block(torch.zeros(1, 7, 4))
    with refused("argument 'x' of Block: got a DTensor; needed plain tensors"):
        block(cp.shard(torch.zeros(1, 7, 4), mesh["cp"], 1))


def test_the_local_view_needs_dtensors(mesh) -> None:
    compiled = torch.compile(Block(), backend=local_cp)
    with pytest.raises(Exception, match="nothing says what to shard"):
        compiled(torch.zeros(1, 8, 4))
    compiled = torch.compile(Block(), backend=local_cp, options={"mesh": mesh})
    with pytest.raises(Exception, match=r"forward is compiled by cp\.ContextParallel"):
        compiled(torch.zeros(1, 8, 4))
