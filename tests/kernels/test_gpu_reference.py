"""The references of `tools.gpu` show what is wrong, and its cases reach it."""

import math

import pytest
import torch

from tests.support import bounds
from tests.unit.step.step_cases import mask_of
from tools.gpu import correctness_cases, reference
from tools.gpu.sections import Mode


@pytest.mark.parametrize("name", correctness_cases.MASKS)
def test_mask_is_that_of_the_operators(name):
    mask = correctness_cases.MASKS[name]
    rows, keys = 250, 320
    row = torch.arange(rows)
    upper, lower = (
        None if f is None else f(row).int() for f in (mask.upper, mask.lower)
    )
    visible = mask.visible(rows, keys)
    seen = reference.seen(visible, upper, lower, rows, keys, "cpu")
    expected, key = mask_of(visible, rows, keys), torch.arange(keys)
    expected &= True if upper is None else key < upper[:, None]
    expected &= True if lower is None else key >= lower[:, None]
    assert torch.equal(seen, expected)
    assert seen.any() == (name not in ("none", "out of reach"))


def test_cases_cover_what_the_kernels_can_do():
    cases = correctness_cases.cases(Mode())
    assert {case.mask for case in cases} == set(correctness_cases.MASKS)
    for dtype in ("bfloat16", "float16", "float32"):
        dims = {case.dim for case in cases if case.dtype == dtype}
        assert dims >= {64, 80, 96, 128, 256}
    for changes in (
        {"order": "BSHD"},
        {"order": "wide"},
        {"accumulate": False},
        {"final": True},
        {"rows": 777},
        {"heads": 8, "kv_heads": 2},
        {"softcap": 1.0, "dropout_p": 0.0},
        {"softcap": 0.0, "dropout_p": 0.1},
        {"softcap": 1.0, "dropout_p": 0.5, "mask": "document vectors"},
        {"bias": "key"},
        {"bias": "distance", "batch": 2, "rows": 500},
    ):
        assert any(changes.items() <= vars(case).items() for case in cases)
    assert len(set(map(str, cases))) == len(cases)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", correctness_cases.DTYPES)
def test_error_ratio_shows_a_limit_that_is_one_too_low(name, dtype):
    """For one tile of rows, that see hundreds of keys each."""
    torch.manual_seed(0)
    rounded = reference.torch_dtype(dtype)
    q, k, v, grad = (torch.randn(1, 1, 512, 64).to(rounded) for _ in range(4))
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    lacking = mask.clone()
    lacking[384:] = mask.tril(-1)[384:]
    exact, wrong = (
        reference.exact(q, k, v, grad, x, 0.125)[name] for x in (mask, lacking)
    )
    rough = reference.rough(q, k, v, grad, mask, 0.125)[name]
    got = exact.to(rounded)
    assert reference.error_ratio(got, rough, exact, dtype) <= 1
    assert reference.error_ratio(wrong, rough, exact, dtype) > 2
    got[0, 0, 3, 3] = math.nan
    assert reference.error_ratio(got, rough, exact, dtype) == math.inf


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_exact_is_autograd_of_softmax(softcap, dropped, biased):
    torch.manual_seed(0)
    changes = reference.UNCHANGED
    if softcap or dropped or biased:
        factors = (torch.rand(2, 4, 9, 9) > 0.3) / 0.7 if dropped else None
        added = torch.randn(2, 4, 9, 9).double() if biased else None
        changes = reference.Changed(softcap, factors, added)
    q, k, v = (torch.randn(2, h, 9, 4).double().requires_grad_() for h in (4, 2, 2))
    grad = torch.randn(2, 4, 9, 4).double()
    mask = torch.ones(9, 9, dtype=torch.bool).tril(-1)  # the first row sees nothing
    found = reference.exact(q, k, v, grad, mask, 0.5, 3, changes)
    rough = reference.rough(q, k, v, grad, mask, 0.5, changes)
    for name, x in rough.items():
        bounds.assert_close(name, found[name], x, floor=bounds.OPERAND_SCALE)
    assert (found["lse"][:, :, 0] == -math.inf).all()
    later = reference.exact(q, k, v, grad, mask, 0.5, 9, changes)
    bounds.assert_close("dq_before", later["dq_before"], found["dq"])
    assert reference.lse_ratio(found["lse"], found["lse"], "float32") == 0
    assert reference.lse_ratio(found["lse"].nan_to_num(), found["lse"], "float32") > 2
