"""Calls that only AOTAutograd sees fail: they are gathered, on every rank."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from cpcompile import config
from cpcompile.compile import inner_compilers
from tests.cpu.against_one_process import compare

sdpa = F.scaled_dot_product_attention
SPLIT_UNEVENLY = (2, 17, 8)


class Picky(torch.autograd.Function):
    """x * 2; DTensors of another gradient than trials give are refused."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        expanded = isinstance(grad, DTensor) and 0 in grad.stride()
        if expanded and grad.device_mesh.get_rank() in ctx.ranks:
            raise ValueError("an expanded gradient, of all things")
        return grad * 2, None


@torch.compiler.allow_in_graph
def picky(x, ranks=(0, 1)):
    return Picky.apply(x, ranks)


@torch.compiler.allow_in_graph
def picky_forward(x):
    local = x._local_tensor if isinstance(x, DTensor) else None
    if isinstance(local, FunctionalTensor):
        raise TypeError("a tensor of AOTAutograd, of all things")
    return x + 1


class Model(nn.Module):
    """`call` is differentiated where a sum gives expanded gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return self.call(x + sdpa(x, x, x)).sum()

    def call(self, x):
        return picky(x)


class Twice(Model):
    def call(self, x):
        y = picky(x)
        return y + picky(x.sin())


class InRegion(Model):
    def call(self, x):
        return checkpoint(lambda y: picky(y.sin()), x, use_reentrant=False)


class OnOneRank(Model):
    """As uneven shards may make it."""

    def call(self, x):
        return picky(x, (1,))


class Forward(Model):
    def call(self, x):
        return picky_forward(x)


def run_model(make, door, **options):
    with config.patch(graph="model"):
        return compare(make, SPLIT_UNEVENLY, 2, door, **options)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("make", [Model, Twice, InRegion, OnOneRank])
def test_the_call_is_gathered_on_every_rank(pools, make, door):
    for found in pools[2].run(run_model, make, door, timeout=90):
        found.check()
        warned = [text for text in found.warnings if "gathered tensors" in text]
        assert len(warned) == (2 if make is Twice else 1)
        for text in warned:
            assert text.startswith("picky at ")
            assert "test_retries.py" in text
            assert "its backward fails: ValueError: an expanded gradient" in text


def run_not_found(strict: bool):
    try:
        with config.patch(graph="model"):
            return compare(Forward, SPLIT_UNEVENLY, 2, strict=strict)
    except BackendCompilerFailed as error:
        return "\n".join([str(error), *error.inner_exception.__notes__])


def test_a_call_that_is_not_found_is_refused(pools):
    for text in pools[2].run(run_not_found, True, timeout=90):
        assert "RewriteError: AOTAutograd cannot trace the sharded graph of" in text
        assert "TypeError: a tensor of AOTAutograd" in text
        assert "{'strict': False}" in text


def test_or_the_graph_is_gathered(pools):
    for found in pools[2].run(run_not_found, False, timeout=90):
        found.check()
        assert any(
            "runs unsharded, with all of its work on every rank" in text
            for text in found.warnings
        )


def run_without_compiler() -> str:
    def missing(gm, inputs):
        raise FileNotFoundError("g++")

    def no_backend(gm, inputs, *_):
        return aot_autograd(fw_compiler=missing)(gm, inputs)

    with mock.patch.object(inner_compilers, "_aot_eager", no_backend):
        try:
            compare(Model, (2, 16, 8), 2)
        except Exception as error:
            return str(error)
    return ""


def test_errors_of_the_inner_compiler_are_its_own(pools):
    for text in pools[2].run(run_without_compiler, timeout=90):
        assert "FileNotFoundError: g++" in text
