"""What folded keys and values save: the elements that the ranks really send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cpcompile.ops.comm import communication
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks

SEQ, HEADS, COPIES = 36, 6, 3


def folded(k):
    return k[:, :, None].expand(-1, -1, COPIES, -1, -1).flatten(1, 2)


def tiled(k):
    """The twin: as many heads, in an order that is not folded."""
    return k.repeat(1, COPIES, 1, 1)


@contextmanager
def counted_elements(sent: list[int]) -> Iterator[None]:
    """Add what every message and collective of the operators sends to `sent`."""
    operation, exchange = dist.P2POp, dist.all_to_all_single

    def point_to_point(op, tensor, *rest):
        if op is dist.isend:
            sent.append(tensor.numel())
        return operation(op, tensor, *rest)

    def all_to_all(received, given, **rest):
        sent.append(given.numel())
        return exchange(received, given, **rest)

    def collective(name):
        original = getattr(communication, name)

        def call(result, given, **rest):
            sent.append(min(result.numel(), given.numel()))
            return original(result, given, **rest)

        return mock.patch.object(communication, name, call)

    with (
        mock.patch.object(dist, "P2POp", point_to_point),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        collective("_ALL_GATHER"),
        collective("_REDUCE_SCATTER"),
    ):
        yield


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@on_ranks(2)
def test_what_is_sent_shrinks_with_the_copies(strategy):
    """Elements sent in a forward and backward, folded and not."""
    totals = []
    for repeat in (folded, tiled):
        torch._dynamo.reset()

        def attend(q, k, v, repeat=repeat):
            k, v = repeat(k), repeat(v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        heads = (HEADS, HEADS // COPIES, HEADS // COPIES)
        inputs = [torch.randn(2, n, SEQ, 8).requires_grad_() for n in heads]
        step = compiled_on(2, attend, shard={"q": 2, "k": 2, "v": 2}, strategy=strategy)
        sent: list[int] = []
        with counted_elements(sent):
            step(*inputs).square().sum().backward()
        totals.append(sum(sent))
    few = totals[0]
    many = totals[1]
    assert many > 0
    if strategy == "ulysses":  # sends queries and results too, of as many heads
        assert few == many // 2 + many // 2 // COPIES
    else:
        assert few * COPIES == many
