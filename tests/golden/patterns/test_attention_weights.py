"""Attention whose weights are returned: each rank has the rows of its queries."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import capture, localised
from tests.support.forms.attention_pattern_forms import causal

SHARD = {"shard": {"q": 2, "k": 2, "v": 2}}


def returned(q, k, v):
    scores = (q @ k.transpose(-2, -1) * 0.5).masked_fill(~causal(q), float("-inf"))
    weights = F.dropout(scores.softmax(-1), 0.0)
    return weights @ v, weights


def with_a_sink(q, k, v, sinks):
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    weights = torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-1]
    return weights @ v, weights


def two_values(q, k, v):
    """The second one is of another width."""
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    out = torch.einsum("bhij,bhjd->bhid", weights, v)
    return out, weights @ v[..., :2]


def not_returned(q, k, v):
    return returned(q, k, v)[0]


def of_itself(q, k, v):
    """Queries are the keys, in one tensor: there is nothing to tell them apart."""
    weights = torch.einsum("bhid,bhjd->bhij", q, q).softmax(-1)
    return weights @ v, weights


def inputs(form):
    more = [torch.randn(4)] if form is with_a_sink else []
    return *torch.randn(3, 2, 4, 6, 8).unbind(), *more


@pytest.mark.parametrize("form", [returned, two_values, with_a_sink])
def test_keys_and_values_are_gathered_for_every_product(mesh, form):
    """Weights are no more than of the own queries; sinks are a column beside them."""

    def loss(q, k, v, *sinks):
        return sum(x.cos().sum() for x in form(q, k, v, *sinks))

    found = localised(loss, *inputs(form), mesh=mesh, **SHARD)
    products = re.findall(r"= aten.bmm\(", found.text)
    gathers = re.findall(r"= _c10d_functional.all_gather_into_tensor\(", found.text)
    assert len(gathers) == len(products) == (3 if form is two_values else 2)
    assert [x.form for x in found.report.by_hand] == ["rows"]


@pytest.mark.parametrize("form", [not_returned, of_itself])
def test_what_stays_or_is_folded(mesh, form):
    """The twins: one is attention as usual, one is not read."""
    found = capture(form, *inputs(form), mesh=mesh, **SHARD)
    assert not found.ctx.findings.row_parallel
    assert len(found.ctx.findings.plans) == (form is not_returned)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def test_a_module_returns_weights_of_a_part_of_the_rows(mesh):
    """The input is inferred."""
    found = localised(Weights(), torch.randn(2, 16, 8), mesh=mesh)
    assert [str(x) for x in found.report.inputs] == ["x dim 1 (inferred)"]
    assert [x.form for x in found.report.by_hand] == ["rows"]
    assert "aten.view(_softmax_1, size=[2, 2, 8, 16])" in found.text
    assert found.report.gathered[1].endswith(" [2, 16, 16]")
