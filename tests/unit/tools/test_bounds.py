"""Comparisons of computed tensors: what they allow, and what they say."""

import pytest
import torch
import torch.nn as nn

from tests.support.bounds import (
    OPERAND_SCALE,
    ROUNDINGS,
    TIMES,
    assert_close,
    bound,
    check,
    deviations,
    in_one_process,
    step,
)

EXACT = torch.tensor([1.0, 2.0], dtype=torch.float64)
EPS, EPS_64 = (torch.finfo(x).eps for x in (torch.float32, torch.float64))


def test_bounds():
    rough = EXACT.float()
    assert bound(EXACT, rough) == TIMES * 2 * EPS
    assert bound(EXACT, rough, floor=5.0) == TIMES * 5 * EPS
    rough[0] += 0.25
    assert bound(EXACT, rough) == TIMES * (0.25 + 2 * EPS)
    assert bound(EXACT) == bound(EXACT, EXACT) == ROUNDINGS * EPS_64 * 2
    other = EXACT + 1e-6 * torch.ones_like(EXACT)
    assert bound(EXACT, other) == pytest.approx(bound(EXACT) + TIMES * 1e-6)
    exact = {"out": EXACT, "grad of x": EXACT, "grad of y": EXACT * 0}
    found = deviations(exact, exact)
    roundings = ROUNDINGS * EPS_64
    largest = roundings * OPERAND_SCALE * 2
    assert [x.bound for x in found] == [roundings * 2, largest, largest]
    with pytest.raises(AssertionError, match=r"\['grad of x'\] are on one side only"):
        deviations({k: v for k, v in exact.items() if k != "grad of x"}, exact)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: assert_close("out", EXACT.float() + 0.5, EXACT, EXACT.float()),
            r"^out: error 0\.5, allowed 9\.54e-07",
        ),
        (lambda: assert_close("out", EXACT * torch.nan, EXACT), "out: error nan"),
        (
            lambda: assert_close("out", EXACT[None], EXACT),
            r"out has shape \[1, 2\], not \[2\]",
        ),
        (lambda: bound(EXACT.float()), "float32 needs a rough result"),
        (lambda: bound(EXACT, EXACT.float() / 0), "nothing is too far"),
    ],
)
def test_a_message_has_the_name_the_error_and_the_bound(call, text):
    assert_close("out", EXACT.float(), EXACT, EXACT.float())
    with pytest.raises(AssertionError, match=text):
        call()


def test_a_step_in_one_process():
    """The exact one is float64, constants included, and the rough one as it is."""
    model = nn.Linear(3, 1)

    def run(model):
        return step(lambda: model(torch.full((2, 3), 0.1)).sum(), model)

    exact, rough = in_one_process(run, model)
    assert list(rough) == ["loss", "grad of weight", "grad of bias"]
    assert {x.dtype for x in exact.values()} == {torch.float64}
    assert {x.dtype for x in rough.values()} == {torch.float32}
    found = [x["grad of weight"][0, 0].item() for x in (exact, rough)]
    assert found[0] == 0.2 != found[1]
    check(deviations(run(model), exact, rough))
