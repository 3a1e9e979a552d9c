"""Every form of attention that torch's Inductor knows is read over a sequence."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.golden.capture import capture
from tests.support.forms.torch_forms import TABLE, Model, numbers_of_torch, pattern


def test_there_are_no_others():
    """A version of torch that knows more of them names what to read next."""
    assert numbers_of_torch() == {*TABLE}


@pytest.mark.parametrize("number", TABLE, ids=str)
def test_they_are_folded(mesh, number):
    """With the dropout that they have, and the input of the sequence is inferred."""
    p = 0.125 if "dropout_p" in inspect.signature(pattern(number)).parameters else 0.0
    model = Model(number, p).to(TABLE[number].dtype or torch.float32)
    tokens = torch.arange(32).reshape(2, 16) % 37
    found = capture(model, tokens, mesh=mesh, strategy="auto")
    assert found.error is None
    assert (
        found["fold_attention_patterns"].rewrites == len(found.ctx.findings.plans) == 1
    )
    (call,) = found.ctx.findings.calls
    assert call.dropout_p == p
    assert found.ctx.findings.gathered_results == ["logits [2, 16, 37]"]
    assert not found.ctx.findings.unmatched_attention
