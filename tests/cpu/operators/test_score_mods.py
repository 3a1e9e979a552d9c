"""A score_mod and the log-sum-exp on several ranks, in every strategy and layout.

The function reads the numbers of heads and tokens, which an exchange of heads changes;
3 ranks have 4 heads and padding.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cpcompile.geometry.layout import Layout, TokenLayout
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.masked_cases import MaskedCase
from tests.cpu.on_ranks import on_ranks
from tests.support.attention_calls import attention
from tests.support.bounds import assert_close
from tests.support.score_programs import packed, text_of, waved, whole

SCALE = 0.3


def captured():
    table = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    return [table.requires_grad_(), torch.arange(64) % 3]


def results(out, lse, leaves):
    """What was computed, and the gradients of something that reads both."""
    (out.sin().sum(-1) * lse.sigmoid()).sum().backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def on_every_rank(case):
    mesh = sequence_mesh(case.world)
    layout = TokenLayout.of(case.layout, case.seq, case.world)
    order, back = layout.permutation(), layout.inverse()
    q, k, v, _ = case.operands()
    leaves = [
        distribute_tensor(x[:, :, order], mesh, [Shard(2)], src_data_rank=None)
        for x in (q, k, v)
    ]
    leaves = [x.requires_grad_() for x in leaves]
    own = captured()
    values = packed(own, q).detach()
    table = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    leaves.append(table.requires_grad_())
    given = {"score_mod": text_of(waved, own, q), "bias": table, "wants_lse": True}
    given["head_groups"] = case.head_groups
    sizes, groups = (case.seq, case.seq), case.groups(mesh)
    out, lse = attention(case.strategy)(
        *leaves[:3], *sizes, False, SCALE, *groups, layout=case.layout.value, **given
    )
    found = [x.full_tensor() for x in results(out, lse, leaves)]
    return [x[:, :, back] if x.ndim > 2 and i < 5 else x for i, x in enumerate(found)]


@pytest.mark.parametrize(
    ("strategy", "world", "seq", "layout", "groups"),
    [
        ("ring", 2, 31, "contiguous", 1),
        ("all_gather", 2, 40, "zigzag", 1),
        ("ulysses", 2, 31, "contiguous", 1),
        ("ulysses", 2, 31, "contiguous", 2),
        ("ulysses", 3, 31, "contiguous", 1),
        ("hybrid", 4, 40, "zigzag", 1),
        ("hybrid", 4, 31, "contiguous", 1),
    ],
)
@on_ranks("world")
def test_against_one_process(strategy, world, seq, layout, groups):
    sizes = {"world": world, "seq": seq, "layout": Layout(layout)}
    sizes["head_groups"] = groups
    case = MaskedCase("none", strategy, torch.float64, **sizes)
    got = on_every_rank(case)
    q, k, v, _ = case.operands()
    own = captured()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = results(*whole(q, k, v, SCALE, own), [*leaves, own[0]])
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, exact, strict=False):
        assert_close(name, x, y)
    assert_close("dtable", got[5].flatten()[:16].view(4, 4), exact[5])
