"""Attention whose batch has the tokens of an input needs nothing of other ranks."""

import pytest
import torch

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.support.grids import MODULES, WIDTH, Stages

MESH_AXES = {"cp": 2}


def found(name, mesh, batch=1):
    make, tokens = MODULES[name]
    x = torch.zeros(batch, tokens, WIDTH)
    return capture(make(), x, mesh=mesh, shard={"x": 1})


def test_windows_are_left_alone(mesh):
    """Global attention is planned, and attention within windows has no message."""
    captured = found("windows", mesh)
    assert captured["find_windows"].rewrites == 1
    assert len(captured.ctx.findings.plans) == 1
    assert_golden(
        captured.lines("window_attention(", "ring_attention", "cp_replicated"),
        """\
cp_window_attention = cp_window_attention(q, k, v, None, False, None,
    False)  # [4, 4, 16, 8] S(0)
ring_attention_default = cp.ring_attention(q_1, k_1, v_1, sizes=[64, 64],
    spec='scale=0.353553', group=GROUP)
getitem_6 = ring_attention_default[0]  # [1, 4, 64, 8] S(2)""",
    )


COUNTS = {"shifted": (1, 1), "biased": (1, 1), "uneven": (1, 1), "axes": (1, 1)}


@pytest.mark.parametrize("name", COUNTS)
def test_which_calls_are_windows(mesh, name):
    captured = found(name, mesh)
    left, planned = COUNTS[name]
    assert captured["find_windows"].rewrites == left
    assert len(captured.ctx.findings.plans) == planned


def test_a_twin_has_its_tokens_in_the_sequence(mesh):
    """Rows of a batch are no windows."""
    make, _ = MODULES["windows"]
    captured = capture(
        make().whole, torch.zeros(8, 16, WIDTH), mesh=mesh, shard={"x": 1}
    )
    assert captured["find_windows"].rewrites == 0
    assert len(captured.ctx.findings.plans) == 1


def test_windows_of_the_rows_of_an_image(mesh):
    """A mask for each window is cut as the windows are; a bias is the same for all."""
    captured = capture(Stages(), torch.zeros(2, 3, 64, 16), mesh=mesh)
    assert captured["find_windows"].rewrites == 2
    assert "cp_replicated" not in captured.text
    assert_golden(
        captured.lines("= cp_window_attention", "cp_shard_1"),
        """\
cp_window_attention = cp_window_attention(q, k, v, getitem, False, None,
    False)  # [32, 4, 16, 8] _S(0, 2)
cp_shard_1 = cp_shard(unflatten_6, 1)  # [2, 4, 4, 16, 16] S(1)
flatten_2 = flatten(cp_shard_1, 0, 1)  # [8, 4, 16, 16] _S(0, 2)
cp_window_attention_1 = cp_window_attention(q_1, k_1, v_1, flatten_2, False, None,
    False)  # [8, 4, 16, 8] _S(0, 2)""",
    )
