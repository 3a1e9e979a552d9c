"""(tokens, batch) that are flattened and brought back, where parts are uneven."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.golden.capture import body, inside, sharded, warnings
from tests.golden.golden_text import assert_golden, lines_with, table
from tests.golden.operands import attend


def sequence_first(part):
    """Attention, and a part of a model for x [S, B, C]."""

    def forward(x):
        return part(attend(x).transpose(0, 1)).transpose(0, 1)

    return forward


def captured(mesh, part, tokens=37):
    return sharded(sequence_first(part), mesh, 2, tokens, 8)


class Projection(nn.Module):
    """As nn.MultiheadAttention projects its results; a transposed weight besides."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        tokens, batch, _ = x.shape
        y = self.linear(x.reshape(tokens * batch, 8))
        return torch.mm(F.gelu(y), self.weight.t()).view(tokens, batch, 8)


PROJECTION = Projection()


def test_a_projection(mesh, caplog):
    """DTensor has a placement for even parts, which stay."""
    texts = {
        name: inside(captured(mesh, PROJECTION, tokens)).split("\nflatten = ")[1]
        for name, tokens in (("uneven", 37), ("even", 40))
    }
    assert_golden(
        table(texts),
        """\
uneven:
  .flatten(transpose_1, 2)
  transpose_2 = .transpose(flatten, 0, 1)
  t = .t(cp_replicate_2)
  cp_row_parallel = cp_row_parallel(reshape, transpose_2, cp_replicate, cp_replicate_1,
      t)
  transpose_3 = .transpose(cp_row_parallel[0], 0, 1)
even:
  .flatten(transpose_1, 2)
  transpose_2 = .transpose(flatten, 0, 1)
  reshape = .reshape(transpose_2, 80, 8)
  y = linear(reshape, cp_replicate, cp_replicate_1)
  gelu = gelu(y)
  t = .t(cp_replicate_2)
  mm = mm(gelu, t)
  view = .view(mm, 40, 2, 8)
  transpose_3 = .transpose(view, 0, 1)""",
    )
    assert warnings(caplog) == []


def test_the_module_of_torch(mesh, caplog):
    module = nn.MultiheadAttention(8, 2, batch_first=True)

    def call(x):
        return x + module(x, x, x, need_weights=False)[0]

    text = body(sharded(call, mesh, 3, 37, 8))
    assert_golden(
        lines_with(text, "= cp_row_parallel", "of_parts(", "= cp_gather"),
        """\
cp_linear_of_parts = cp_linear_of_parts(query, cp_replicate_1, cp_replicate)
cp_row_parallel = cp_row_parallel(reshape, permute_default, cp_replicate_2,
    cp_replicate_3)
cp_gather = cp_gather(add)""",
    )
    assert "cp_replicated" not in text
    assert warnings(caplog) == []


WORDS = {
    "view": lambda x: x.contiguous().view(-1, 8).relu().view(37, 2, 8),
    "the rest is unknown": lambda x: x.reshape(74, -1).relu().view(37, 2, -1),
    "flatten": lambda x: torch.flatten(x, 0, 1).relu().unflatten(0, (37, 2)),
    "unknown tokens": lambda x: x.flatten(0, 1).relu().unflatten(0, (-1, 2)),
    "to the end": lambda x: x.flatten().relu().view(37, 2, 8),
    "another order": lambda x: x.mT.reshape(-1, 2).relu().reshape(37, 2, 8),
}


@pytest.mark.parametrize("name", WORDS)
def test_every_word_for_it(name, mesh, caplog):
    text = captured(mesh, WORDS[name]).text
    assert len(re.findall(r"= cp_row_parallel\(", text)) == 1
    assert warnings(caplog) == []


STAYS = {
    "rows meet": lambda x: x.reshape(-1, 8).cumsum(0).view(37, 2, 8),
    "a row is read": lambda x: x.reshape(-1, 8).roll(1, 0).view(37, 2, 8),
    "random numbers": lambda x: F.dropout(x.reshape(-1, 8), 0.5).view(37, 2, 8),
    "read as rows": lambda x: x + x.reshape(-1, 8).norm(dim=0),
    "tokens with tokens": lambda x: torch.mm(
        x.reshape(-1, 8), x.reshape(-1, 8)[:8]
    ).view(37, 2, 8),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_twin_is_no_call_on_rows(name, mesh, caplog):
    """Rows are dealt out anew, or exchanged; nothing is gathered."""
    found = captured(mesh, STAYS[name])
    assert "cp_row_parallel" not in found.text
    assert "cp_replicated" not in found.text


OF_NUMBERS = {
    "view": lambda x: x.view(1),
    "reshape": lambda x: x.reshape(-1),
    "mean": lambda x: x.mean(0),
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(0, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0),
    "gather": lambda x: x.gather(0, torch.tensor(0)),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_numbers_have_no_tokens(mesh, caplog, name):
    """A call of a loss, which has no dimensions; torch counts one, to name it."""
    assert "ring_attention" in body(
        sharded(lambda x: OF_NUMBERS[name](attend(x).square().mean()), mesh)
    )
    assert warnings(caplog) == []
