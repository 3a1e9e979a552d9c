"""Masks that are buffers: their values are read, or they stay what they are."""

import gc

import pytest
import torch

from cpcompile.errors import BufferChangedError
from cpcompile.frontend.arguments import module_buffers
from cpcompile.passes.graph.context import Buffer
from cpcompile.passes.model.masks import constant_buffers
from cpcompile.passes.model.masks.constant_buffers import Unchanged, without_changing
from tests.support.constant_masks import (
    READ,
    STAYS,
    Masked,
    Padded,
    Writing,
    causal,
    token_ids,
)
from tests.unit.masks.mask_cases import check, check_read, read


@pytest.mark.parametrize("case", READ)
def test_what_a_buffer_says(case):
    mask, text = READ[case]
    found = check_read(Masked(mask), text, token_ids())
    (node,) = found.ctx.findings.read_by_value
    assert found.ctx.buffers[node].name == "buffer attn_mask"


@pytest.mark.parametrize("case", STAYS)
def test_what_has_no_form_stays_the_buffer(case):
    """The twin: it is read when the program runs, whatever its value is then."""
    mask, text = STAYS[case]
    model = Masked(mask)
    found = read(model, token_ids())
    assert found.text == text
    assert not found.ctx.findings.read_by_value
    check(found, token_ids())
    model.attn_mask.copy_(model.attn_mask.flip(-1))
    check(found, token_ids())


def test_buffers_beside_data():
    visible = torch.rand(2, 24) > 0.2
    found = read(Padded(causal(5)), token_ids(), visible)
    assert found.text == "causal, window 5, key padding"
    assert len(found.ctx.findings.read_by_value) == 1
    check(found, token_ids(), visible)
    check(found, token_ids(), ~visible)
    found = read(Writing(causal()), token_ids(), torch.tensor(True))
    assert found.text == "dense bool [24, 24]"
    assert not found.ctx.findings.read_by_value
    model = Masked(causal())
    del model.attn_mask
    model.attn_mask = torch.nn.Parameter(causal(), requires_grad=False)
    assert read(model, token_ids()).text == "dense bool [24, 24]"


def test_which_inputs_are_buffers():
    found: list[list[str]] = []

    def backend(gm, _):
        found.append([x.name for x in module_buffers(gm.graph).values()])
        return gm

    torch._dynamo.reset()
    torch.compile(Padded(causal()), backend=backend)(token_ids(), torch.ones(2, 24) > 0)
    with torch.inference_mode():
        model = Masked(causal())
        torch.compile(model, backend=backend)(token_ids())
    assert found == [["buffer attn_mask"], []], "no version of an inference tensor"


def unchanged(value):
    return Unchanged(Buffer("buffer mask", value, None))


def test_versions_tell_whether_values_are_compared(monkeypatch):
    value, other = causal(4).float(), causal(3).float()
    same = unchanged(value)
    same.check(value)
    compared = []
    equal = constant_buffers._is_equal
    monkeypatch.setattr(
        constant_buffers, "_is_equal", lambda x, y: compared.append(x) or equal(x, y)
    )
    assert same(value) and same(value) and not compared
    value.add_(0.0)
    assert same(value) and same(value) and len(compared) == 1
    value.copy_(other)
    assert not same(value) and not same(value) and len(compared) == 2
    with pytest.raises(BufferChangedError, match="buffer mask has changed since it"):
        same.check(value)
    value.copy_(causal(4))
    assert same(value)
    value.data = other
    assert not same(value)
    assert not same(other) and same(causal(4).float())
    assert not same(causal(4)) and not same(causal(4).float()[:5])
    nan = torch.tensor([0.0, torch.nan])  # equal to itself
    assert unchanged(nan)(nan.clone()) and not unchanged(nan)(torch.tensor([0.0, 1.0]))


def test_layers_with_one_value_share_a_copy():
    first, second = unchanged(causal(2)), unchanged(causal(2))
    assert first._copy is second._copy
    assert unchanged(causal(3))._copy is not first._copy
    del first, second
    gc.collect()
    assert all(not torch.equal(x, causal(2)) for x in constant_buffers._copies.values())


def test_a_buffer_that_goes_on_changing_is_data(caplog):
    constant_buffers.forget()
    code = test_a_buffer_that_goes_on_changing_is_data.__code__
    buffers = {"node": Buffer("buffer mask", causal(), None)}
    seen = constant_buffers._values.setdefault(code, {})
    seen[constant_buffers._key(buffers["node"])] = {"a", "b", "c"}
    assert without_changing(buffers, code) == buffers
    seen[constant_buffers._key(buffers["node"])].add("d")
    assert without_changing(buffers, code) == {}
    assert without_changing(buffers, None) == buffers
    (text,) = [r.getMessage() for r in caplog.records]
    assert text.startswith("buffer mask had 4 values in attention masks")
    constant_buffers.forget()
