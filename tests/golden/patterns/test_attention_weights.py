"""Attention whose weights are returned: each rank has the rows of its queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, table
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


def captured(form, mesh, **options):
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    more = [torch.randn(4)] if form is with_a_sink else []
    return capture(form, q, k, v, *more, mesh=mesh, **SHARD | options)


def test_keys_and_values_are_gathered_for_every_product(mesh):
    """Sinks are a column beside the scores."""
    texts = {}
    for form in (returned, two_values, with_a_sink):
        found = captured(form, mesh)
        assert found["fold_attention_patterns"].rewrites == 1
        words = ("= matmul", "softmax(", "= cp_gather_keys", "= einsum", "= cat")
        texts[form.__name__] = found.lines(*words)
    assert_golden(
        table(texts),
        """\
returned:
  constraint_1 = cp_gather_keys(transpose)  # [2, 4, 8, 6] R
  matmul = matmul(cp_shard_1, constraint_1)  # [2, 4, 6, 6] S(2)
  softmax = .softmax(scores, -1)  # [2, 4, 6, 6] S(2)
  constraint_2 = cp_gather_keys(cp_shard_2)  # [2, 4, 6, 8] R
  matmul_1 = matmul(softmax, constraint_2)  # [2, 4, 6, 8] S(2)
two_values:
  constraint_1 = cp_gather_keys(cp_shard_1)  # [2, 4, 6, 8] R
  einsum = einsum('bhid,bhjd->bhij', cp_shard, constraint_1)  # [2, 4, 6, 6] S(2)
  weights = .softmax(einsum, -1)  # [2, 4, 6, 6] S(2)
  constraint_2 = cp_gather_keys(cp_shard_2)  # [2, 4, 6, 8] R
  out = einsum('bhij,bhjd->bhid', weights, constraint_2)  # [2, 4, 6, 8] S(2)
  constraint_3 = cp_gather_keys(getitem)  # [2, 4, 6, 2] R
  matmul = matmul(weights, constraint_3)  # [2, 4, 6, 2] S(2)
with_a_sink:
  constraint_1 = cp_gather_keys(mT)  # [2, 4, 8, 6] R
  matmul = matmul(cp_shard, constraint_1)  # [2, 4, 6, 6] S(2)
  cat = cat([matmul, cp_replicate], -1)  # [2, 4, 6, 7] S(2)
  softmax = .softmax(cat, -1)  # [2, 4, 6, 7] S(2)
  constraint_2 = cp_gather_keys(cp_shard_2)  # [2, 4, 6, 8] R
  matmul_1 = matmul(weights, constraint_2)  # [2, 4, 6, 8] S(2)""",
    )


@pytest.mark.parametrize("form", [not_returned, of_itself])
def test_what_stays_or_is_folded(mesh, form):
    """The twins: one is attention as usual, one is not read."""
    found = captured(form, mesh)
    assert not found.ctx.findings.row_parallel
    assert "cp_gather_keys" not in found.text
    assert len(found.ctx.findings.plans) == (form is not_returned)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def test_a_module_returns_weights_of_a_part_of_the_rows(mesh):
    """The input is inferred."""
    found = capture(Weights(), torch.randn(2, 16, 8), mesh=mesh, strategy="auto")
    (given,) = [x for x in found.ctx.inputs.values() if x.dim is not None]
    assert (given.name, given.dim) == ("x", 1)
    assert found.lines("mean_dim = ").endswith("# [2, 16, 16] S(1)")
    assert len(found.ctx.findings.row_parallel) == 1
