"""Masks that are no function of positions are biases of pairs, however strict."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.unit.masks.mask_builders as b
from cpcompile.passes.model.masks import unread_masks
from tests.unit.masks.mask_cases import attend, check, operands, read

S = 21


def of_some_rows(q, k):
    """A causal mask of data: what is made of it is no constant."""
    return b.causal(q, k) & (q[..., :1] > -9)


UNREAD = {
    "matmul": lambda q, k: (q @ k.transpose(-1, -2)) > 0,
    "cumsum over pairs": lambda q, k: of_some_rows(q, k).cumsum(-1) > 3,
    "roll": lambda q, k: of_some_rows(q, k).roll(1, -1),
    "sort": lambda q, k: b.alibi(q, k).sort(-1).values,
    "random": lambda q, k: torch.rand(S, S) > 0.5,
    "merged": lambda q, k: torch.arange(S * S).view(S, S) % 7 > 2,
    "all of a row": lambda q, k: (
        of_some_rows(q, k).all(-1, keepdim=True)
        | b.blocks(q, k, torch.arange(S).expand(2, -1))
    ),
    "sums of keys": lambda q, k: (q @ k.mT).sum(-2, keepdim=True),
    "after attention": lambda q, k: F.scaled_dot_product_attention(q, k, k) @ k.mT > 0,
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", UNREAD)
def test_what_is_computed_for_all_pairs_is_a_bias(case, strict, caplog):
    q, k = operands(S)
    found = read(attend(UNREAD[case]), q, k, strict=strict)
    call, mask = found.calls[-1], found.masks[-1]
    assert call.unsupported is None
    assert mask.unread is not None and mask.unread.reason
    assert mask.text.startswith("dense ")
    value = call.mask.meta["example_value"]
    assert mask.unread.bytes == value.nbytes and not mask.unread.is_large
    assert [r.getMessage() for r in caplog.records if "attn_mask" in r.msg] == []
    if case != "random":
        check(found, q, k)


def test_what_is_large(monkeypatch):
    """The least limit counts where a share of the operands is less."""
    q, k = operands(S)
    held = 4 * 4 * (2 * 2 * S * 4)  # bytes of q, k, v and the result
    size = 2 * 2 * S * S  # of a bool mask with heads

    def is_large(least, share):
        monkeypatch.setattr(unread_masks, "LEAST_LIMIT", least)
        found = read(attend(UNREAD["matmul"]), q, k, whole_mask_share=share)
        unread = found.masks[0].unread
        return unread is None or unread.is_large  # read by rows, where it is large

    assert not is_large(size, 0.0)
    assert is_large(size - 1, 0.0)
    assert not is_large(0, size / held)
    assert is_large(0, (size - 1) / held)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(S, S + 1, dtype=torch.bool), r"expanded size|broadcast"),
        (torch.ones(S, S, dtype=torch.int64), "attn_mask dtype"),
    ],
)
def test_a_wrong_mask_is_an_error_of_torch(mask, error):
    with pytest.raises(Exception, match=error):
        read(attend(b.given), *operands(S), mask)
