"""FlopCounterMode counts the visible pairs of the cp:: operators, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile import config
from cpcompile.layout import Chunks
from cpcompile.ops.ring_attention import ring_backward, ring_forward
from tests.unit.step_cases import BATCH, HEADS, LINES, MASKS, SCALE

R, K, D, E, G = 11, 9, 8, 6, 2
STRATEGIES = ["ring", "all_gather"]

ops = torch.ops.cp


def counted(fn, *args):
    """Floating point operations of fn(*args)."""
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()


def per_pair(head_dims, value_dims):
    """Two operations per multiplication and addition, in all heads of the batch."""
    return 2 * BATCH * HEADS * (head_dims * D + value_dims * E)


def operands(rows, keys):
    shapes = ((HEADS, rows, E), (HEADS, rows, D), (G, keys, D), (G, keys, E))
    return [torch.randn(BATCH, *shape) for shape in shapes]


@pytest.mark.parametrize("kernel", ["aten_flash", "aten_math"])
@pytest.mark.parametrize("mask", LINES)
def test_steps(mask, kernel):
    limits = MASKS[mask](R, K)
    pairs = int(limits.mask(R, K).sum())
    grad, q, k, v = operands(R, K)
    lists = limits.visible.to_lists()
    rest = (*lists, SCALE, True, kernel)
    forward = counted(ops.attention_step, q, k, v, None, None, None, None, *rest)
    assert forward == pairs * per_pair(1, 1)
    out, lse = torch.zeros(BATCH, HEADS, R, E), torch.zeros(BATCH, HEADS, R)
    given = (grad, q, k, v, lse, lse)
    dkdv = counted(ops.attention_step_dkdv, *given, None, None, None, None, *rest)
    assert dkdv == pairs * per_pair(2, 2)  # q k', grad v'; dv, dk
    dq = counted(ops.attention_step_dq, *given, None, None, None, *rest)
    assert dq == pairs * per_pair(2, 1)  # q k', grad v'; dq
    joint = counted(ops.attention_step_backward, *given[:4], out, lse, None, *rest)
    assert joint == pairs * per_pair(3, 2)  # q k', grad v'; dv, dk, dq


def test_vectors_count_as_no_limit():
    _, q, k, v = operands(R, K)
    upper = torch.ones(R, dtype=torch.int32)
    rest = ([], [0, 4], [], [], SCALE, True, "aten_math")
    assert counted(
        ops.attention_step, q, k, v, None, None, upper, None, *rest
    ) == R * 4 * per_pair(1, 1)


def on_rank(rank, ranks, count):
    """count(group) in a group that exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        return count(mesh.get_group().group_name)
    finally:
        dist.destroy_process_group()


def local(rank, ranks, q_len, kv_len):
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    return operands(queries.count(rank), keys.count(rank))


def pairs_of_rank(rank, ranks, q_len, kv_len, causal):
    queries = Chunks(q_len, ranks)
    positions = range(queries.start(rank), queries.start(rank) + queries.count(rank))
    return sum(min(p + 1, kv_len) if causal else kv_len for p in positions)


LENGTHS = [(16, 16), (13, 13), (3, 3), (7, 30), (30, 7)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize("rank", range(4))
def test_whole_operators(strategy, causal, q_len, kv_len, rank):
    grad, q, k, v = local(rank, 4, q_len, kv_len)
    out, lse = torch.zeros_like(grad), torch.zeros(q.shape[:3])

    def count(group):
        rest = (q_len, kv_len, causal, SCALE, group)
        forward = getattr(ops, f"{strategy}_attention")
        backward = getattr(ops, f"{strategy}_attention_backward")
        return (
            counted(forward, q, k, v, *rest),
            counted(backward, grad, q, k, v, out, lse, *rest),
        )

    pairs = pairs_of_rank(rank, 4, q_len, kv_len, causal)
    expected = pairs * per_pair(1, 1), pairs * per_pair(3, 2)
    assert on_rank(rank, 4, count) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_step(strategy):
    """What a user counts: the backward runs under autograd."""
    _, *qkv = local(2, 4, 13, 13)
    leaves = [x.requires_grad_() for x in qkv]

    def count(group):
        def train():
            op = getattr(ops, f"{strategy}_attention")
            op(*leaves, 13, 13, True, SCALE, group)[0].sum().backward()

        return counted(train)

    pairs = pairs_of_rank(2, 4, 13, 13, True)
    assert on_rank(2, 4, count) == pairs * (per_pair(1, 1) + per_pair(3, 2))


@pytest.mark.parametrize("kernel", ["aten_flash", "aten_math"])
@pytest.mark.parametrize("rank", range(3))
def test_a_ring_is_the_sum_of_its_steps(rank, kernel):
    """An unrolled ring and the operator count the same."""
    grad, q, k, v = local(rank, 3, 13, 13)
    out, lse = torch.zeros_like(grad), torch.zeros(q.shape[:3])

    def count(group):
        rest = (13, 13, True, SCALE, group)
        with config.patch(step_kernel=kernel):
            return [
                counted(fn, *given, *rest)
                for fn, given in (
                    (ring_forward, (q, k, v)),
                    (ops.ring_attention, (q, k, v)),
                    (ring_backward, (grad, q, k, v, out, lse)),
                    (ops.ring_attention_backward, (grad, q, k, v, out, lse)),
                )
            ]

    unrolled_forward, forward, unrolled_backward, backward = on_rank(rank, 3, count)
    assert unrolled_forward == forward > 0
    assert unrolled_backward == backward > 0


def test_no_tokens_cost_nothing():
    _, q, k, v = operands(0, 0)
    rest = ([0, 0], [], [], [], SCALE, True, "aten_math")
    assert counted(ops.attention_step, q, k, v, None, None, None, None, *rest) == 0
