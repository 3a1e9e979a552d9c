"""Masks that are no function of positions are refused, or kept with a warning."""

from __future__ import annotations

import pytest
import torch

import tests.unit.masks.mask_builders as b
from tests.unit.masks.mask_cases import attend, check, operands, read

S = 21


def of_some_rows(q, k):
    """A causal mask of data: what is made of it is no constant."""
    return b.causal(q, k) & (q[..., :1] > -9)


REFUSED = {
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_to_be_computed_for_all_pairs_is_refused(case):
    found = read(attend(REFUSED[case]), *operands(S))
    assert found.text == "refused", found.text
    text = found.calls[0].obstacle
    assert "cannot be read as a function of positions" in text
    assert "pass it to the compiled function" in text
    assert " bytes on every rank" in text


@pytest.mark.parametrize("case", REFUSED)
def test_or_is_kept_with_a_warning(case, caplog):
    q, k = operands(S)
    found = read(attend(REFUSED[case]), q, k, strict=False)
    assert found.text.startswith("dense ")
    texts = [r.getMessage() for r in caplog.records]
    (warning,) = [text for text in texts if "attn_mask" in text]
    value = found.calls[0].mask.meta["example_value"]
    assert f"Every rank computes {value.nbytes} bytes" in warning
    if case != "random":
        check(found, q, k)


@pytest.fixture(autouse=True)
def forget_warnings():
    from cpcompile.logs import warn_once

    warn_once.cache_clear()


def test_a_wrong_shape_is_an_error_of_torch():
    q, k = operands(S)
    with pytest.raises(Exception, match=r"expanded size|broadcast"):
        read(attend(b.given), q, k, torch.ones(S, S + 1, dtype=torch.bool))


def test_a_wrong_dtype_is_an_error_of_torch():
    q, k = operands(S)
    with pytest.raises(Exception, match="attn_mask dtype"):
        read(attend(b.given), q, k, torch.ones(S, S, dtype=torch.int64))
