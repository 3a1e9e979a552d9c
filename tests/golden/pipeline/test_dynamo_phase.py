"""What DTensor is made to answer while Dynamo traces does not outlive that phase."""

import torch

import cpcompile as cp
from tests.golden.capture import capture, forget


def flat(x):
    """DTensor cannot flatten 13 tokens on 8 ranks in this order."""
    return x.transpose(0, 1).reshape(-1, 8).relu()


def text_of_plain_inputs(mesh):
    return capture(lambda x: flat(x), torch.randn(2, 13, 8), mesh=mesh, shard={"x": 1})


def test_answers_are_forgotten_when_the_backend_is_called(mesh):
    alone = text_of_plain_inputs(mesh)
    assert "cp_replicated(reshape, " in alone.text
    forget()
    sharded = capture(lambda x: flat(x), cp.shard(torch.randn(2, 13, 8), mesh, 1))
    assert "cp_replicated(reshape, " in sharded.text
    assert text_of_plain_inputs(mesh).text == alone.text
