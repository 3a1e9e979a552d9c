"""Tile tables and compile-time constants of the step kernels."""

import itertools

import pytest
import torch

from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.configs import ARCHITECTURES, Kernel, configs
from cpcompile.kernels.constants import (
    EVERY_KEY,
    LOG2_E,
    NO_MODIFIERS,
    RowLimits,
    ScoreModifiers,
    dot_precision,
    step_constants,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PADDED_DIMS = (16, 32, 64, 128, 256)


def constants(**changed):
    given = {
        "config": configs(Kernel.FORWARD, "sm90", torch.bfloat16, 128)[0],
        "rows": 1024,
        "keys": 1024,
        "head_dim": 96,
        "value_dim": 128,
        "heads_per_kv": 4,
        "limits": EVERY_KEY,
        "accumulate": True,
        "scale": 0.5,
        "precision": "ieee",
        "divides": lambda n, block: n % block == 0,
        "changes": NO_MODIFIERS,
    }
    return step_constants(**given | changed)


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sm75", "sm86", "sm120"])
def test_every_combination_has_a_config(kernel, architecture):
    for dtype, dim in itertools.product(DTYPES, PADDED_DIMS):
        found = configs(kernel, architecture, dtype, dim)
        assert 1 <= len(found) <= 4 and len(set(found)) == len(found)
        for config in found:
            # tl.dot needs 16 of each, tl.arange a power of two.
            for block in (config.block_m, config.block_n):
                assert block >= 16 and block & (block - 1) == 0
            assert config.num_warps in (4, 8) and config.num_stages >= 1


@pytest.mark.parametrize(
    ("keys", "limits", "even"),
    [
        (1024, None, True),
        (1000, None, False),
        (1024, (0, 512), True),
        (1024, (7, 512), False),
        (1024, (512, 4096), True),  # cut at 1024
        (1000, (0, 512), False),
    ],
)
def test_tiles_are_even_if_nothing_cuts_one(keys, limits, even):
    assert (
        constants(keys=keys, limits=RowLimits(Visible(keys=limits)))["EVEN_KEYS"]
        is even
    )


def test_a_slice_of_a_symbolic_size_is_not_even():
    """Whether it ends beyond the size is not known before run time."""
    size = object()
    given = {"keys": size, "divides": lambda n, block: True}
    assert constants(**given)["EVEN_KEYS"] is True
    limits = RowLimits(Visible(keys=(0, 512)))
    assert constants(**given, limits=limits)["EVEN_KEYS"] is False


def test_a_softcap_is_the_scale_of_its_tanh():
    """c * tanh(scale / c * s): one factor is inside, one outside."""
    plain, capped = constants(), constants(changes=ScoreModifiers(softcap=20.0))
    assert capped.keys() - plain.keys() == {"SCALE_IN_CAP"}
    assert capped["SCALE_IN_CAP"] == 0.5 / 20
    assert capped["SCALE_LOG2"] == 20 * LOG2_E


@pytest.mark.parametrize(
    ("dtype", "allowed", "expected"),
    [
        (torch.float32, "high", "tf32"),
        (torch.float32, "highest", "ieee"),
        (torch.bfloat16, "high", "ieee"),
    ],
)
def test_dot_precision_follows_the_matmuls(monkeypatch, dtype, allowed, expected):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    monkeypatch.setattr(torch.version, "hip", None)
    assert dot_precision(dtype) == expected
