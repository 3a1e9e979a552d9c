"""Which kernel runs a step, and what is said where it is not the usual one."""

import itertools

import pytest
import torch

from cpcompile import config, logs
from cpcompile.kernels import choice
from cpcompile.kernels.choice import (
    StepKernel,
    masked_step_kernel,
    step_kernel,
    why_no_flash,
)
from tests.golden.capture import warnings

TEMPLATE, FLASH, MATH = StepKernel.TEMPLATE, StepKernel.FLASH, StepKernel.MATH
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
        *itertools.product(["cpu"], DTYPES, [(64, 64), (7, 24), (300, 300)]),
        *itertools.product(
            ["cuda"], DTYPES[:3], [(64, 64), (7, 24), (256, 256), (1, 1)]
        ),
        *itertools.product(["xpu"], DTYPES, [(64, 64)]),
    ],
)
def test_the_usual_kernel_is_chosen_without_a_word(caplog, device, dtype, dims):
    assert step_kernel(device, dtype, *dims) is usual(device, dtype)
    with config.patch(step_kernel="aten_math"):  # can be had everywhere
        assert step_kernel(device, dtype, *dims) is MATH
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [*itertools.product(DTYPES, [(257, 257), (64, 320)]), (torch.float64, (64, 64))],
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


def test_a_kernel_that_does_not_exist():
    with config.patch(step_kernel="cutlass"), pytest.raises(ValueError):
        step_kernel("cpu", torch.float32, 64, 64)


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "expected"),
    [
        ("cpu", torch.float32, 1000, True),
        ("cpu", torch.float64, 8, False),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float16, 257, False),
        ("cuda", torch.float32, 64, False),
        ("meta", torch.float16, 64, False),
    ],
)
def test_flash(device, dtype, dim, expected):
    assert (why_no_flash(device, dtype, dim) is None) is expected


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
