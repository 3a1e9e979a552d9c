"""Attention by hand is folded whatever asks, and wherever its tokens begin."""

from __future__ import annotations

import pytest
import torch

from tests.golden.capture import capture
from tests.support.forms.query_forms import (
    ASKING,
    WIDTH,
    Asking,
    Captions,
    Rows,
    RowsFlattened,
)


def folded(model, *inputs, mesh, **options):
    found = capture(model, *inputs, mesh=mesh, until="insert_attention", **options)
    assert not found.ctx.findings.unmatched_attention
    return found["fold_attention_patterns"].rewrites


@pytest.mark.parametrize("name", ASKING)
def test_queries_that_are_no_tokens(mesh, name):
    assert folded(Asking(ASKING[name]), torch.randn(2, 16, WIDTH), mesh=mesh) == 1


@pytest.mark.parametrize("named", [True, False])
def test_tokens_that_begin_beside_a_sharded_input(mesh, named):
    inputs = torch.zeros(2, 16, dtype=torch.long), torch.randn(2, 3, 16, 16)
    options = {"shard": {"ids": 1}} if named else {}
    assert folded(Captions(), *inputs, mesh=mesh, **options) == 1


@pytest.mark.parametrize("named", [True, False])
def test_tokens_of_rows_that_are_sharded(mesh, named):
    options = {"shard": {"image": 2}} if named else {}
    assert folded(RowsFlattened(), torch.randn(2, 3, 32, 16), mesh=mesh, **options) == 1


def test_a_twin_within_rows_stays(mesh):
    found = capture(Rows(), torch.randn(2, 8, 8, WIDTH), mesh=mesh, shard={"x": 1})
    assert found["fold_attention_patterns"].rewrites == 0
    assert len(found.ctx.findings.unmatched_attention) == 1
