"""Tile tables and compile-time constants of the step kernels."""

import itertools

import pytest
import torch

from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.kernels.configs import ARCHITECTURES, Kernel, configs, padded
from cpcompile.kernels.constants import (
    EVERY_KEY,
    LOG2_E,
    NO_MODIFIERS,
    RowLimits,
    ScoreModifiers,
    dot_precision,
    step_constants,
    tensor_names,
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
    ("other", "known"),
    [("sm103", "sm100"), ("sm87", "sm80"), ("gfx950", "gfx942"), ("gfx90a", "gfx942")],
)
def test_other_architectures_use_the_nearest_table(other, known):
    for kernel in Kernel:
        expected = configs(kernel, known, torch.bfloat16, 128)
        assert configs(kernel, other, torch.bfloat16, 128) == expected


def test_padded():
    assert [padded(x) for x in (1, 16, 17, 64, 80, 96, 129)] == [
        16, 16, 32, 64, 128, 128, 256,
    ]  # fmt: skip


def test_constants_of_dims_and_scale():
    """The kernels take the maximum of the scores before scaling them."""
    got = constants()
    assert (got["HEAD_DIM"], got["PADDED_HEAD_DIM"]) == (96, 128)
    assert (got["VALUE_DIM"], got["PADDED_VALUE_DIM"]) == (128, 128)
    assert got["SCALE_LOG2"] == 0.5 * LOG2_E and not got["NEGATE"]
    assert got["PRECISION"] == "'ieee'"  # pasted into the source, so with quotes
    got = constants(scale=-0.5)
    assert got["SCALE_LOG2"] == 0.5 * LOG2_E and got["NEGATE"]
    assert got["SCALE"] == -0.5
    assert constants(scale=0.0)["SCALE_LOG2"] > 0  # hidden scores stay hidden


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


@pytest.mark.parametrize("vector", [False, True])
def test_constants_of_limits(vector):
    rows = torch.ones(1) if vector else None
    visible = ALL if vector else Visible(upper=(3, -4))
    got = constants(limits=RowLimits(visible, rows))
    assert got["HAS_UPPER"] and got["UPPER_VECTOR"] is vector and not got["HAS_LOWER"]
    assert (got["UPPER_EVEN"], got["UPPER_ODD"]) == ((0, 0) if vector else (3, -4))


def test_values_can_be_pasted_into_a_source():
    limits = RowLimits(Visible((0, 8), (0, 8), (1, 1)))
    for value in constants(limits=limits).values():
        assert type(value) in (int, float, bool, str)


def test_a_softcap_is_the_scale_of_its_tanh():
    """c * tanh(scale / c * s): one factor is inside, one outside."""
    plain, capped = constants(), constants(changes=ScoreModifiers(softcap=20.0))
    assert capped.keys() - plain.keys() == {"SCALE_IN_CAP"}
    assert capped["SCALE_IN_CAP"] == 0.5 / 20
    assert capped["SCALE_LOG2"] == 20 * LOG2_E


def test_second_outputs_are_the_last_tensor():
    limits = RowLimits(upper=torch.ones(1), lower=torch.ones(1))
    given = {"accumulate": True, "limits": limits, "changes": NO_MODIFIERS}
    assert tensor_names(Kernel.FORWARD, **given)[-3:] == ("UPPER", "LOWER", "LSE_OUT")
    assert tensor_names(Kernel.DKDV, **given)[-3:] == ("UPPER", "LOWER", "DV_OUT")
    assert tensor_names(Kernel.DQ, **given)[-3:] == ("DQ_IN", "UPPER", "LOWER")


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
