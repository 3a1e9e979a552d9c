"""What folded keys and values save: the bytes that a rank receives for attention.

That these are what ranks really send is shown in tests/cpu/tools/test_accounts.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from cpcompile.accounting.graph_account import Purpose
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks

SEQ, HEADS, COPIES = 36, 6, 3


class Attend(nn.Module):
    """Keys in copies, one beside the other, or in an order that is not folded."""

    def __init__(self, folds: bool) -> None:
        super().__init__()
        self.folds = folds

    def forward(self, q, k, v):
        k, v = (
            x.repeat_interleave(COPIES, 1) if self.folds else x.repeat(1, COPIES, 1, 1)
            for x in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@on_ranks(2)
def test_what_is_sent_shrinks_with_the_copies(strategy):
    """In a forward and backward."""
    heads = (HEADS, HEADS // COPIES, HEADS // COPIES)
    inputs = [torch.randn(2, n, SEQ, 8).double().requires_grad_() for n in heads]
    totals = []
    for folds in (True, False):
        options = {"strategy": strategy, "shard": {"q": 2, "k": 2, "v": 2}}
        found = compare_calls(Attend(folds), [inputs], 2, **options)
        found.check()
        sent = [x.bytes for x in found.exchanges if x.purpose is Purpose.ATTENTION]
        totals.append(sum(sent))
    few, many = totals
    assert many > 0
    if strategy == "ulysses":  # sends queries and results too, of as many heads
        assert few == many // 2 + many // 2 // COPIES
    else:
        assert few * COPIES == many
