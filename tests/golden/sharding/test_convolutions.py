"""Convolutions that keep the number of tokens run on shards."""

from __future__ import annotations

import re

import pytest
import torch

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, lines_with
from tests.support.forms.convolved_forms import FORMS, TWINS, Model

MESH_AXES = {"cp": 2}
WORDS = ("conv", "pad", "slice")


def captured(mesh, name, length=16):
    tokens = torch.zeros(2, length, dtype=torch.long)
    return capture(Model(name), tokens, mesh=mesh, strategy="auto")


def test_pad_convolutions(mesh):
    found = captured(mesh, "sliced")
    step = found["pad_convolutions"]
    assert step.rewrites == 2
    words = ("= conv1d(", "= conv1d[", "= padded_convolution(", "silu = ")
    parts = [lines_with(x, *words) for x in (step.before, step.after, found.text)]
    first = [
        each.split("\nconv1d_1 =")[0].split("\npadded_convolution_1 =")[0]
        for each in parts
    ]
    named = re.sub(r"l_self_\w+_(weight|bias)_", r"\1", "\n  ->\n".join(first))
    assert_golden(
        named,
        """\
conv1d = conv1d(mT, weight, bias, (1,), (3,), (1,), 16)  # [2, 16, 19]
getitem_3 = conv1d[..., :16]  # [2, 16, 16]
silu = silu(getitem_3)  # [2, 16, 16]
  ->
padded_convolution = padded_convolution(mT, weight, bias, (1,), [(3, 0)], (1,),
    16)  # [2, 16, 16]
silu = silu(padded_convolution)  # [2, 16, 16]
  ->
padded_convolution = padded_convolution(mT, cp_replicate_9, cp_replicate_10, (1,),
    [(3, 0)], (1,), 16)  # [2, 16, 16] S(2)
silu = silu(padded_convolution)  # [2, 16, 16] S(2)""",
    )


@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("name", FORMS)
def test_nothing_is_gathered(mesh, name, length):
    if name == "grid" and length == 17:
        length = 24
    found = captured(mesh, name, length)
    assert len(found.ctx.findings.plans) == 2
    assert found.ctx.findings.gathered_results == [f"linear_4 [2, {length}, 23]"]
    assert "cp_replicated" not in found.text
    assert found.text.count("padded_convolution(") >= 2


def test_rows_that_are_cut_are_borrowed(mesh):
    """5 rows of 4 columns on 2 ranks: 3 and 2, of 10 tokens each."""
    found = captured(mesh, "grid", 20)
    assert len(found.ctx.findings.plans) == 2
    assert "padded_convolution(" in found.text
    assert "cp_replicated" not in found.text


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays(mesh, name):
    """Its results are not those of its tokens; windows are moved for it."""
    found = captured(mesh, name)
    assert found["pad_convolutions"].rewrites == 0
    assert "cp_move_tokens(" in found.text and "cp_replicated" not in found.text
