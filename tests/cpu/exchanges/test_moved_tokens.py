"""cp::moved_tokens on real ranks: tokens, and gradients that go back to them.

Nothing is computed by the forward, so that it is equal. In the reference torch does the
same with the whole sequence.
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry import token_pieces
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.comm.moved_tokens import WHOLE
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import assert_close
from tests.support.whole_sequences import normal

FILL = 0.25


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1::2] = y
    return x


# By name: the pieces for sources of n tokens, and what torch computes.
KINDS = {
    "slice": (lambda n: token_pieces.sliced(n, 2, -1, 1), lambda x: x[:, 2:-1]),
    "stride": (lambda n: token_pieces.sliced(n, 1, None, 3), lambda x: x[:, 1::3]),
    "roll": (lambda n: token_pieces.rolled(n, 3), lambda x: x.roll(3, 1)),
    "flip": (lambda n: token_pieces.flipped(n), lambda x: x.flip(1)),
    "pad": (
        lambda n: token_pieces.padded(n, 2, 3, "constant"),
        lambda x: F.pad(x, (0, 0, 2, 3), value=FILL),
    ),
    "replicate": (
        lambda n: token_pieces.padded(n, 2, 3, "replicate"),
        lambda x: torch.cat([x[:, :1]] * 2 + [x] + [x[:, -1:]] * 3, 1),
    ),
    "cat": (
        lambda n, m: token_pieces.concatenated([n, m]),
        lambda x, y: torch.cat([x, y], 1),
    ),
    "assign": (lambda n, m: token_pieces.assigned(n, 1, None, 2, 1), written),
}


def part(x: Tensor, layout: str, rank: int, ranks: int) -> Tensor:
    """The tokens of a rank, of a whole sequence [2, tokens, 3]."""
    if layout == WHOLE:
        return x
    tokens = TokenLayout.of(Layout(layout), x.shape[1], ranks)
    return x[:, tokens.positions(rank)]


def run(kind: str, length: int, layouts: str, dtype: torch.dtype) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    ranks = dist.get_world_size()
    pieces_of, reference = KINDS[kind]
    *of_sources, last = layouts.split()
    counts = [length, len(range(1, length, 2))]
    whole = [normal((2, n, 3), dtype, i) for i, n in enumerate(counts)]
    whole = whole[: len(of_sources)]
    joined = pieces_of(*[x.shape[1] for x in whole])
    floating = dtype.is_floating_point
    own = [
        part(x, layout, rank, ranks).clone().requires_grad_(floating)
        for x, layout in zip(whole, of_sources, strict=True)
    ]
    out = torch.ops.cp.moved_tokens(
        own,
        1,
        [x.shape[1] for x in whole],
        layouts,
        [*chain.from_iterable(joined.pieces)],
        joined.length,
        FILL,
        group.group_name,
    )
    wanted = reference(*whole)
    assert out.dtype == dtype and out.is_contiguous()
    assert torch.equal(out, part(wanted, last, rank, ranks))
    if not floating:
        return
    out.backward(part(normal(wanted.shape, dtype, 9), last, rank, ranks))
    leaves = [x.double().requires_grad_() for x in whole]
    reference(*leaves).backward(normal(wanted.shape, dtype, 9).double())
    for x, leaf, layout in zip(own, leaves, of_sources, strict=True):
        grad = x.grad
        if layout == WHOLE:  # this rank's summand
            dist.all_reduce(grad)
        exact = part(leaf.grad, layout, rank, ranks)
        assert_close("gradient", grad, exact, exact.to(dtype))


CASES = [
    (
        kind,
        f"{first} {second} {first}"
        if kind in ("cat", "assign")
        else f"{first} {first}",
    )
    for kind in KINDS
    for first in ("contiguous", "zigzag", "striped")
    for second in ("contiguous", WHOLE)
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4, 1])
@pytest.mark.parametrize("length", [17, 24, 5])
@pytest.mark.parametrize(("kind", "layouts"), dict.fromkeys(CASES))
@on_ranks("world")
def test_tokens_and_gradients(kind, layouts, length, world, dtype) -> None:
    run(kind, length, layouts, dtype)
