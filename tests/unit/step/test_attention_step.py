"""cp::attention_step adds one chunk of keys to what the earlier steps found."""

import pytest
import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.ops.step.step_arguments import StepChunk
from tests.cpu.attention_cases import lse_tolerance
from tests.support.bounds import check as check_bounds
from tests.support.bounds import deviation
from tests.support.pairwise import in_pairs
from tests.unit.step.step_cases import (
    AXES,
    FOLD_AXES,
    HEADS,
    MASKS,
    SCALE,
    Inputs,
    StepCase,
    assert_close,
    attend,
    plain,
    step_cases,
)

EMPTY = float("-inf")
KERNELS = ["aten_flash", "aten_math"]
VISIBLES = [ALL, NOTHING, Visible(upper=(1, 1)), Visible(upper=(1, 0))]

attention_step = torch.ops.cp.attention_step.default


def earlier_state(case, inputs):
    """out and lse of the earlier chunk, as the step before left them."""
    if case.earlier == "no row":
        return None, None
    state = attend(inputs.q, inputs.k_0, inputs.v_0, inputs.mask_0)
    return tuple(x.to(case.accumulation) for x in state)


def run(case, inputs, state):
    operands = (inputs.q, inputs.k, inputs.v, *state)
    return attention_step(*operands, *case.arguments, case.final, case.kernel)


def check(case):
    inputs = Inputs.of(case)
    state = earlier_state(case, inputs)
    out, lse = run(case, inputs, state)
    exact, exact_lse = attend(inputs.q, *inputs.whole())
    assert out.dtype == (case.dtype if case.final else case.accumulation)
    assert_close("out", out, exact, exact, plain(inputs).out)
    assert lse.dtype == case.accumulation
    empty = exact_lse == EMPTY
    assert torch.equal(lse == EMPTY, empty)
    assert not out[empty].any()
    _, rough_lse = attend(inputs.q, *inputs.whole(), case.accumulation)
    limit = lse_tolerance(case.dtype, exact_lse, rough_lse)
    check_bounds([deviation("lse", lse, exact_lse, limit=limit)])
    assert lse.is_contiguous()


@pytest.mark.parametrize("case", step_cases(AXES, FOLD_AXES), ids=str)
def test_forward(case):
    check(case)


@in_pairs({"mask": tuple(MASKS), "earlier": AXES["earlier"], "kernel": KERNELS})
def test_every_mask(mask, earlier, kernel):
    check(StepCase(kernel=kernel, mask=mask, earlier=earlier, kv_heads=2))


@pytest.mark.parametrize("mask", ["none", "causal", "parity", "rows"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_argument_is_written_to_or_returned(kernel, mask):
    case = StepCase(kernel=kernel, mask=mask)
    inputs = Inputs.of(case)
    state = earlier_state(case, inputs)
    given = (inputs.q, inputs.k, inputs.v, *state)
    copies = [x.clone() for x in given]
    results = run(case, inputs, state)
    assert all(map(torch.equal, given, copies))
    assert {x.data_ptr() for x in given}.isdisjoint(x.data_ptr() for x in results)


def operands(rows, keys, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, HEADS, rows, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("visible", VISIBLES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_no_tokens_passes_the_accumulators_on(kernel, visible, dtype):
    arguments = StepChunk.plain(SCALE, visible).arguments()
    q, k, v = operands(7, 0, dtype)
    out, lse = torch.randn(2, HEADS, 7, 6), torch.randn(2, HEADS, 7)
    lse[:, :, 2] = EMPTY
    for final in (False, True):
        got = attention_step(q, k, v, out, lse, *arguments, final, kernel)
        assert torch.equal(got[0], out.to(dtype) if final else out)
        assert torch.equal(got[1], lse)
    first = attention_step(q, k, v, None, None, *arguments, False, kernel)
    assert not first[0].any() and first[0].shape == out.shape
    assert (first[1] == EMPTY).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("visible", VISIBLES, ids=str)
def test_no_rows(kernel, visible):
    """A rank of an uneven sequence may hold no query."""
    q, k, v = operands(0, 5)
    arguments = StepChunk.plain(SCALE, visible).arguments()
    out, lse = attention_step(q, k, v, None, None, *arguments, True, kernel)
    assert out.shape == (2, HEADS, 0, 6)
    assert lse.shape == (2, HEADS, 0)


OPCHECK_AXES = AXES | {
    "mask": ("all", "none", "causal", "parity"),
    "kv_heads": (2,),
    "dims": ((8, 6),),
    "sizes": ((11, 9),),
}


@pytest.mark.parametrize("case", step_cases(OPCHECK_AXES), ids=str)
def test_opcheck(case):
    inputs = Inputs.of(case)
    operands = (inputs.q, inputs.k, inputs.v, *earlier_state(case, inputs))
    how = (case.final, case.kernel, torch.ones(3))
    torch.library.opcheck(attention_step, (*operands, *case.arguments, *how))


def test_keywords_are_arguments_too():
    case = StepCase(final=True)
    inputs = Inputs.of(case)
    state = earlier_state(case, inputs)
    names = [x.name for x in attention_step._schema.arguments]
    values = (
        *(inputs.q, inputs.k, inputs.v, *state),
        *(*case.arguments, True, case.kernel, None),
    )
    got = attention_step(**dict(zip(names, values, strict=True)))
    assert all(map(torch.equal, got, run(case, inputs, state)))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = attention_step(**dict(zip(names, values, strict=True)))
    assert out.dtype == case.dtype


@pytest.mark.parametrize(
    ("told", "kernel", "message"),
    [
        ({"visible": [1]}, "aten_math", "make the list by Visible"),
        ({"visible": [2, 1, 1, 0, 4, 8]}, "aten_math", "make the list by Visible"),
        ({"upper": torch.ones(11)}, "aten_math", "needed integers, in visible, or"),
        ({}, "flash", "'flash' is not a valid StepKernel"),
    ],
)
def test_what_an_operator_is_not_told(told, kernel, message):
    inputs = Inputs.of(StepCase())
    arguments = StepChunk.plain(SCALE).arguments()._replace(**told)
    operands = (inputs.q, inputs.k, inputs.v, None, None)
    with pytest.raises(ValueError, match=message):
        attention_step(*operands, *arguments, True, kernel)
