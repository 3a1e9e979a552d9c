"""Attention without dropout draws nothing, whatever kernel of whatever device it is."""

from __future__ import annotations

import torch

from cpcompile.passes.flow.trial import draws_numbers

aten = torch.ops.aten


def test_which_calls_draw():
    q = torch.zeros(1)
    flash_on_gpu = aten._scaled_dot_product_flash_attention.default
    efficient_on_gpu = aten._scaled_dot_product_efficient_attention.default
    assert not draws_numbers(flash_on_gpu, (q, q, q), {})  # by default there is none
    assert not draws_numbers(flash_on_gpu, (q, q, q, 0.0, True), {})
    assert not draws_numbers(efficient_on_gpu, (q, q, q, None, True, 0.0), {})
    assert draws_numbers(flash_on_gpu, (q, q, q, 0.2), {})
    assert draws_numbers(efficient_on_gpu, (q, q, q, None, True), {"dropout_p": 0.1})
    assert draws_numbers(aten.native_dropout.default, (q, 0.0, True), {})
    assert not draws_numbers(aten.mm.default, (q, q), {})
