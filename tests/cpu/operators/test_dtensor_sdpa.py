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
    check_case,
    distributed_inputs,
    make_inputs,
    run_case,
    sequence_mesh,
)
from tests.support.bounds import OPERAND_SCALE, assert_close


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_eager_attention_without_sequence_sharding(pools, placement, kv_heads, causal):
    case = AttentionCase(
        entry="eager",
        causal=causal,
        kv_heads=kv_heads,
        q_placement=placement,
        kv_placement=placement,
    )
    check_case(case, pools[case.world].run(run_case, case)[0])


@pytest.mark.parametrize("batch", [1, 3])
def test_eager_attention_with_a_batch_that_does_not_divide(pools, batch):
    case = AttentionCase(
        entry="eager", batch=batch, q_placement=Shard(0), kv_placement=Shard(0)
    )
    check_case(case, pools[case.world].run(run_case, case)[0])


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


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize(
    ("dim", "mask_shape"),
    [
        (0, (67, 67)),
        (1, (67, 67)),
        (2, (67, 67)),
        (2, (2, 1, 67, 67)),
        (2, (1, 4, 67, 67)),
        (0, (2, 1, 67, 67)),
        (1, (1, 4, 67, 67)),
    ],
)
def test_a_plain_mask_in_eager(pools, dim, mask_shape, floating):
    """A plain tensor among DTensors is the same on every rank, also as a mask."""
    case = AttentionCase(seq=67)
    mask = band_mask(mask_shape)
    if floating:
        mask = torch.zeros(mask_shape).masked_fill(~mask, float("-inf"))
    got = pools[case.world].run(run_masked, case, dim, mask)[0]

    def alone(dtype):
        q, k, v, grad = (x.to(dtype).requires_grad_() for x in make_inputs(case))
        wide = mask.to(dtype) if floating else mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=wide)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())

    values = got, alone(torch.float64), alone(torch.float32)
    for name, *each in zip(("out", "dq", "dk", "dv"), *values, strict=True):
        assert_close(name, *each, floor=OPERAND_SCALE)


@pytest.mark.parametrize("dim", [None, 0], ids=["whole", "rows sharded"])
def test_a_distributed_mask_in_eager(pools, dim):
    case = AttentionCase(seq=67)
    mask = band_mask((67, 67))
    placement = Replicate() if dim is None else Shard(dim)
    plain = pools[case.world].run(run_masked, case, 2, mask)[0]
    got = pools[case.world].run(run_masked, case, 2, mask, placement)[0]
    assert all(map(torch.equal, got, plain))


def run_dropout_kernel(case):
    """What aten's own kernel does with dropout on a DTensor of `case`."""
    q, k, v = distributed_inputs(case)[:3]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    try:
        kernel(q, k, v, 0.5, True)
    except DropoutError as error:
        return str(error)
    return None


def test_the_kernel_refuses_dropout_on_a_sharded_sequence(pools):
    messages = pools[2].run(run_dropout_kernel, AttentionCase())
    assert messages[0] == messages[1]
    assert messages[0] == (
        "attention on a DTensor sharded along the sequence: got dropout_p=0.5; needed "
        "0.0, because each rank would draw its own mask. Set the model's attention "
        "dropout to 0 or call model.eval()"
    )
