"""Which kernel runs a step, its tiles, and its constants."""

import itertools

import pytest
import torch

from cpcompile import config, logs
from cpcompile.geometry.visibility import Visible
from cpcompile.kernels import choice
from cpcompile.kernels.choice import (
    StepKernel,
    masked_step_kernel,
    step_kernel,
)
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
from tests.golden.capture import warnings

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
        for each in found:
            # tl.dot needs 16 of each, tl.arange a power of two.
            for block in (each.block_m, each.block_n):
                assert block >= 16 and block & (block - 1) == 0
            assert each.num_warps in (4, 8) and each.num_stages >= 1


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


def test_slices_and_softcaps():
    # Whether it ends beyond the size is not known before run time.
    size = object()
    given = {"keys": size, "divides": lambda n, block: True}
    assert constants(**given)["EVEN_KEYS"] is True
    limits = RowLimits(Visible(keys=(0, 512)))
    assert constants(**given, limits=limits)["EVEN_KEYS"] is False
    # c * tanh(scale / c * s): one factor is inside, one outside.
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


TEMPLATE, FLASH, MATH = StepKernel.TEMPLATE, StepKernel.FLASH, StepKernel.MATH
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def forgotten_warnings():
    logs.warn_once.cache_clear()
    yield
    logs.warn_once.cache_clear()


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(choice, "_has_triton", lambda: False)


def usual(device, dtype):
    """What runs where nothing is said."""
    if device == "cuda":
        return TEMPLATE
    return FLASH if device == "cpu" and dtype != torch.float64 else MATH


@pytest.mark.parametrize(
    ("device", "dtype", "dims"),
    [
        *itertools.product(["cpu"], ALL_DTYPES, [(64, 64), (7, 24), (300, 300)]),
        *itertools.product(
            ["cuda"], ALL_DTYPES[:3], [(64, 64), (7, 24), (256, 256), (1, 1)]
        ),
        *itertools.product(["xpu"], ALL_DTYPES, [(64, 64)]),
    ],
)
def test_the_usual_kernel_is_chosen_without_a_word(caplog, device, dtype, dims):
    assert step_kernel(device, dtype, *dims) is usual(device, dtype)
    with config.patch(step_kernel="aten_math"):  # can be had everywhere
        assert step_kernel(device, dtype, *dims) is MATH
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *itertools.product(ALL_DTYPES, [(257, 257), (64, 320)]),
        (torch.float64, (64, 64)),
    ],
)
def test_cuda_without_a_template_or_flash(caplog, dtype, dims):
    for _ in range(3):
        assert step_kernel("cuda", dtype, *dims) is MATH
    (text,) = warnings(caplog)
    wrong = (
        "bfloat16, float16 and float32, not float64"
        if dtype == torch.float64
        else f"head dims up to 256, not {max(dims)}"
    )
    assert text == (
        f"attention in {str(dtype).removeprefix('torch.')} with head dim {max(dims)} "
        f"runs on aten_math: the Triton kernels take {wrong}"
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_cuda_without_triton(caplog, no_triton, dtype):
    """The vendor's kernel is the next best, where it takes the dtype."""
    expected = FLASH if dtype in HALVES else MATH
    assert step_kernel("cpu", torch.float32, 64, 64) is FLASH  # without a word
    for _ in range(3):
        assert step_kernel("cuda", dtype, 64, 64) is expected
    (text,) = warnings(caplog)
    assert text == (
        f"attention in {str(dtype).removeprefix('torch.')} with head dim 64 runs on "
        f"{expected.value}: triton is not installed (pip install triton)"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_that_is_asked_for(caplog, device):
    with config.patch(step_kernel="triton"):
        assert step_kernel(device, torch.bfloat16, 64, 64) is TEMPLATE
    with config.patch(step_kernel="aten_flash"):
        assert step_kernel(device, torch.bfloat16, 64, 64) is FLASH
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "dim", "got"),
    [
        ("triton", "cpu", torch.float64, 64, MATH),
        ("triton", "cpu", torch.bfloat16, 300, FLASH),
        ("triton", "cuda", torch.bfloat16, 300, MATH),
        ("aten_flash", "cpu", torch.float64, 64, MATH),
        ("aten_flash", "cuda", torch.float32, 64, MATH),
        ("aten_flash", "cuda", torch.bfloat16, 300, MATH),
        ("aten_flash", "xpu", torch.bfloat16, 64, MATH),
    ],
)
def test_a_kernel_that_is_asked_for_in_vain(caplog, wanted, device, dtype, dim, got):
    with config.patch(step_kernel=wanted):
        for _ in range(3):
            assert step_kernel(device, dtype, dim, dim) is got
    (text,) = warnings(caplog)
    assert f"with head dim {dim} runs on {got.value}: " in text
    assert wanted == "triton" or device == "xpu" or "flash" in text.split(": ")[1]


@pytest.mark.parametrize(
    ("bias", "table", "expected"),
    [
        (None, False, TEMPLATE),
        (torch.float32, True, TEMPLATE),
        (torch.bfloat16, True, TEMPLATE),
        (torch.bfloat16, False, MATH),
        (torch.float64, True, MATH),
        (torch.bool, True, MATH),
    ],
)
def test_templates_take_a_bias_of_positions(bias, table, expected):
    given = ("cuda", torch.bfloat16, 64, 64, bias)
    assert masked_step_kernel(*given, table=table) is expected
    assert masked_step_kernel(*given, changes=True, table=table) is expected
