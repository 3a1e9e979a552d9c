"""Ulysses with heads in groups takes less memory than with all heads at once."""

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.cpu.attention_cases import sequence_mesh
from tests.support.attention_calls import attention
from tools.bench.resident import (
    give_back_freed_blocks,
    keep_freed_blocks,
    peak,
    reset_peak,
)

LENGTH, HEADS, HEAD_DIM = 2048, 16, 64


def most_bytes(rank_count: int, head_groups: int) -> list[int]:
    """Return by how much a rank grows in a forward, and in a step."""
    mesh = sequence_mesh(rank_count)
    shape = (1, HEADS, LENGTH // rank_count, HEAD_DIM)
    q, k, v = (
        DTensor.from_local(torch.randn(shape), mesh, [Shard(2)]) for _ in range(3)
    )
    sizes = (LENGTH, LENGTH, True, 0.125, mesh.get_group(0).group_name)

    def forward():
        with torch.no_grad():
            attention("ulysses")(q, k, v, *sizes, head_groups=head_groups)

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, *_ = attention("ulysses")(*leaves, *sizes, head_groups=head_groups)
        out.sum().backward()

    found = []
    give_back_freed_blocks()
    try:
        for call in (forward, step):
            call()  # loads what is loaded once
            growth = []
            for _ in range(3):
                before = reset_peak()
                call()
                growth.append(peak() - before)
            found.append(max(growth))
    finally:
        keep_freed_blocks()
    return found


def test_groups_take_less(pools):
    """q, k and v of a rank are 12 MiB, which are sent, arrive and are unpacked."""
    of_all, in_groups = (pools[2].run(most_bytes, 2, count)[0] for count in (1, 4))
    for whole, parts, share in zip(of_all, in_groups, (0.9, 0.9), strict=True):
        assert whole >= 24 * 2**20
        assert parts <= share * whole
