"""Which kernel runs a step, and what is said where it is not the usual one."""

from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (7, 24), (300, 300)])
def test_cpu(caplog, dtype, dims):
    expected = MATH if dtype == torch.float64 else FLASH
    assert step_kernel("cpu", dtype, *dims) is expected
    assert warnings(caplog) == []


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("dims", [(64, 64), (7, 24), (256, 256), (1, 1)])
def test_cuda(caplog, dtype, dims):
    assert step_kernel("cuda", dtype, *dims) is TEMPLATE
    assert warnings(caplog) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_device(caplog, dtype):
    assert step_kernel("xpu", dtype, 64, 64) is MATH
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *((dtype, dims) for dtype in DTYPES for dims in ((257, 257), (64, 320))),
        (torch.float64, (64, 64)),
    ],
)
def test_cuda_without_a_template_or_flash(caplog, dtype, dims):
    for _ in range(3):
        assert step_kernel("cuda", dtype, *dims) is MATH
    (text,) = warnings(caplog)
    name = str(dtype).removeprefix("torch.")
    assert text.startswith(
        f"attention in {name} with head dim {max(dims)} runs on aten_math: "
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_cuda_without_triton(caplog, no_triton, dtype):
    """The vendor's kernel is the next best, where it takes the dtype."""
    expected = FLASH if dtype in HALVES else MATH
    for _ in range(3):
        assert step_kernel("cuda", dtype, 64, 64) is expected
    (text,) = warnings(caplog)
    assert f"runs on {expected.value}: triton is not installed" in text


def test_cpu_without_triton(caplog, no_triton):
    assert step_kernel("cpu", torch.float32, 64, 64) is FLASH
    assert warnings(caplog) == []


def text_of(caplog, *args):
    step_kernel(*args)
    (text,) = warnings(caplog)
    return fill(text, 80)


def test_text_of_a_dtype(caplog):
    assert_expected_inline(
        text_of(caplog, "cuda", torch.float64, 128, 128),
        """\
attention in float64 with head dim 128 runs on aten_math: the Triton kernels
take bfloat16, float16 and float32, not float64""",
    )


def test_text_of_a_head_dim(caplog):
    assert_expected_inline(
        text_of(caplog, "cuda", torch.bfloat16, 128, 320),
        """\
attention in bfloat16 with head dim 320 runs on aten_math: the Triton kernels
take head dims up to 256, not 320""",
    )


def test_text_of_a_missing_triton(caplog, no_triton):
    assert_expected_inline(
        text_of(caplog, "cuda", torch.bfloat16, 64, 64),
        """\
attention in bfloat16 with head dim 64 runs on aten_flash: triton is not
installed (pip install triton)""",
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 300])
def test_math_can_be_had_everywhere(caplog, device, dtype, dim):
    with config.patch(step_kernel="aten_math"):
        assert step_kernel(device, dtype, dim, dim) is MATH
    assert warnings(caplog) == []


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


@pytest.mark.parametrize(
    ("device", "dtype", "dim"),
    [
        ("cuda", torch.float32, 64),
        ("cpu", torch.float64, 64),
        ("cuda", torch.half, 300),
    ],
)
def test_the_reason_is_that_of_the_kernel_that_was_asked_for(
    caplog, device, dtype, dim
):
    with config.patch(step_kernel="aten_flash"):
        text = text_of(caplog, device, dtype, dim, dim)
    assert "flash" in text.split(": ")[1]


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
