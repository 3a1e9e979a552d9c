"""F.scaled_dot_product_attention on DTensors in eager: masks, dropout, other shardings.

Sequence-sharded calls without a mask are in test_attention_numerics.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.errors import DropoutError
from tests.cpu.attention_cases import (
    AttentionCase,
    distributed_inputs,
    make_inputs,
    sequence_mesh,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import OPERAND_SCALE, assert_close


def band_mask(shape):
    """Each row sees some keys and none sees all; every batch and head has its own."""
    rows, keys = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    width = torch.arange(3, 3 + math.prod(shape[:-2])).view(*shape[:-2], 1, 1)
    return (rows - keys).abs() <= width


def run_masked(case, dim, mask, mask_placement=None):
    """F.scaled_dot_product_attention with a mask, on DTensors sharded on `dim`."""
    q, k, v, grad = distributed_inputs(case, dim)
    if mask_placement is not None:
        mesh = sequence_mesh(case.world)
        mask = distribute_tensor(mask, mesh, [mask_placement], src_data_rank=None)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    return [x.full_tensor() for x in (out.detach(), *grads)]


SHAPES = [
    *((dim, (67, 67)) for dim in (0, 1, 2)),
    *((2, shape) for shape in ((2, 1, 67, 67), (1, 4, 67, 67))),
    (0, (2, 1, 67, 67)),
    (1, (1, 4, 67, 67)),
]


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize(("dim", "mask_shape"), SHAPES)
@on_ranks(2)
def test_a_plain_mask_in_eager(dim, mask_shape, floating):
    """A plain tensor among DTensors is the same on every rank, also as a mask."""
    case = AttentionCase(seq=67)
    mask = band_mask(mask_shape)
    if floating:
        mask = torch.zeros(mask_shape).masked_fill(~mask, float("-inf"))
    got = run_masked(case, dim, mask)

    def alone(dtype):
        q, k, v, grad = (x.to(dtype).requires_grad_() for x in make_inputs(case))
        wide = mask.to(dtype) if floating else mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=wide)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())

    values = got, alone(torch.float64), alone(torch.float32)
    for name, *each in zip(("out", "dq", "dk", "dv"), *values, strict=True):
        assert_close(name, *each, floor=OPERAND_SCALE)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@on_ranks(2)
def test_a_distributed_mask_in_eager(placement):
    """It is whole, or its rows are sharded."""
    case, mask = AttentionCase(seq=67), band_mask((67, 67))
    plain = run_masked(case, 2, mask)
    assert all(map(torch.equal, run_masked(case, 2, mask, placement), plain))


@on_ranks(2)
def test_the_kernel_refuses_dropout_on_a_sharded_sequence():
    q, k, v = distributed_inputs(AttentionCase())[:3]
    with pytest.raises(DropoutError) as caught:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.5, True)
    assert str(caught.value) == (
        "attention on a DTensor sharded along the sequence: got dropout_p=0.5; needed "
        "0.0, because each rank would draw its own mask. Set the model's attention "
        "dropout to 0 or call model.eval()"
    )
