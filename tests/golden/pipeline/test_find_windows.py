"""Attention whose batch has the tokens of an input needs nothing of other ranks."""

import pytest
import torch

from cpcompile.passes.graph.context import IN_WINDOWS
from tests.golden.capture import capture, localised
from tests.support.grids import MODULES, WIDTH, Stages

MESH_AXES = {"cp": 2}
# The result, and of shifted windows rows that gradients of weights read.
GATHERED = {"windows": 1, "shifted": 3, "biased": 1, "axes": 1}


def found(fn, mesh, x, **options):
    """How many calls the pass leaves alone, and the captured passes."""
    captured = capture(fn, x, mesh=mesh, until="choose_strategy", **options)
    left = [call.already_local for call in captured.ctx.findings.calls]
    return left.count(IN_WINDOWS), captured


@pytest.mark.parametrize("name", ["windows", "shifted", "biased", "uneven", "axes"])
def test_windows_are_left_alone(name, mesh):
    """Attention over all tokens, or along the other axis, is planned."""
    make, tokens = MODULES[name]
    left, captured = found(make(), mesh, torch.zeros(1, tokens, WIDTH), shard={"x": 1})
    assert (left, len(captured.ctx.findings.plans)) == (1, 1)


@pytest.mark.parametrize("name", GATHERED)
def test_attention_in_windows_gathers_nothing(name, mesh):
    make, tokens = MODULES[name]
    x = torch.zeros(2, tokens, WIDTH)
    text = localised(make(), x, mesh=mesh, shard={"x": 1}).text
    assert text.count("all_gather_into_tensor(") == GATHERED[name]


def test_a_twin_has_its_tokens_in_the_sequence(mesh):
    """Rows of a batch are no windows."""
    make, _ = MODULES["windows"]
    x = torch.zeros(8, 16, WIDTH)
    left, captured = found(make().whole, mesh, x, shard={"x": 1})
    assert (left, len(captured.ctx.findings.plans)) == (0, 1)


def test_windows_of_the_rows_of_an_image(mesh):
    left, captured = found(Stages(), mesh, torch.zeros(2, 3, 64, 16))
    assert (left, len(captured.ctx.findings.plans)) == (2, 0)
