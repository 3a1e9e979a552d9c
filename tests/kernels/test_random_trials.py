"""Attention without dropout draws nothing, whatever kernel of whatever device it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cpcompile.passes.flow.trial import Trial, draws_numbers
from tests.golden.capture import fake_group
from tests.kernels.fake_cuda import fake_cuda

aten = torch.ops.aten


@pytest.fixture
def on_heads() -> Iterator[tuple[Trial, DTensor]]:
    """q [2, 4, 16, 64] on a fake GPU, its heads on two ranks."""
    with fake_cuda(), fake_group(rank=0, ranks=2):
        mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("tp",))
        mode = FakeTensorMode()
        with mode:
            local = torch.randn(2, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
            q = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
            yield Trial(mode), q.detach().requires_grad_()


def flash(q, p):
    return aten._scaled_dot_product_flash_attention(q, q, q, p, True)[0]


def efficient(q, p):
    found = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, p, True)
    return found[0]


def cudnn(q, p):
    found = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, p, True)
    return found[0]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("kernel", [flash, efficient, cudnn])
def test_attention_that_is_split_on_heads_stays_so(on_heads, kernel, dropout_p):
    """With dropout it does not: without a GPU DTensor has no generator for it."""
    trial, q = on_heads
    result, problem = trial.run(kernel, (q, dropout_p), {})
    assert (problem is None) == (dropout_p == 0.0)
    assert problem is not None or result.placements == (Shard(1),)


def test_which_calls_draw():
    q = torch.zeros(1)
    flash_on_gpu = aten._scaled_dot_product_flash_attention.default
    efficient_on_gpu = aten._scaled_dot_product_efficient_attention.default
    assert not draws_numbers(flash_on_gpu, (q, q, q), {})  # by default there is none
    assert not draws_numbers(flash_on_gpu, (q, q, q, 0.0, True), {})
    assert not draws_numbers(efficient_on_gpu, (q, q, q, None, True, 0.0), {})
    assert draws_numbers(flash_on_gpu, (q, q, q, 0.2), {})
    assert draws_numbers(efficient_on_gpu, (q, q, q, None, True), {"dropout_p": 0.1})
    assert draws_numbers(aten.native_dropout.default, (q, 0.0, True), {})
    assert not draws_numbers(aten.mm.default, (q, q), {})
