"""cp::attention_step adds one chunk of keys to what the earlier steps found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import NOTHING, Visible, visible_chunk
from tests.cpu.attention_cases import lse_tolerance
from tests.support.bounds import check as check_bounds
from tests.support.bounds import deviation
from tests.support.pairwise import in_pairs, selected_cases
from tests.unit.step.fold_cases import fold_cases
from tests.unit.step.step_cases import (
    AXES,
    HEADS,
    MASKS,
    SCALE,
    Inputs,
    StepCase,
    assert_close,
    attend,
    plain,
)

EMPTY = float("-inf")
KERNELS = ["aten_flash", "aten_math"]
NO_LIMITS = ([], [], [], [])

attention_step = torch.ops.cp.attention_step.default


def earlier_state(case, inputs):
    """out and lse of the earlier chunk, as the step before left them."""
    if case.earlier == "no row":
        return None, None
    state = attend(inputs.q, inputs.k_0, inputs.v_0, inputs.mask_0)
    return tuple(x.to(case.accumulation) for x in state)


def run(case, inputs, state):
    limits = case.limits
    return attention_step(
        inputs.q,
        inputs.k,
        inputs.v,
        *state,
        *limits.vectors(),
        *limits.visible.to_lists(),
        SCALE,
        case.final,
        case.kernel,
    )


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


@pytest.mark.parametrize(
    "case", [StepCase(**values) for values in selected_cases(AXES)], ids=str
)
def test_forward(case):
    check(case)


@in_pairs({"mask": tuple(MASKS), "earlier": AXES["earlier"], "kernel": KERNELS})
def test_every_mask(mask, earlier, kernel):
    check(StepCase(kernel=kernel, mask=mask, earlier=earlier, kv_heads=2))


@pytest.mark.parametrize("case", fold_cases(), ids=str)
def test_fold(case):
    check(case)


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
@pytest.mark.parametrize(
    "lists",
    [NO_LIMITS, NOTHING.to_lists(), ([], [], [1, 1], []), ([], [], [1, 0], [])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_no_tokens_passes_the_accumulators_on(kernel, lists, dtype):
    q, k, v = operands(7, 0, dtype)
    out, lse = torch.randn(2, HEADS, 7, 6), torch.randn(2, HEADS, 7)
    lse[:, :, 2] = EMPTY
    for final in (False, True):
        got = attention_step(
            q, k, v, out, lse, None, None, *lists, SCALE, final, kernel
        )
        assert torch.equal(got[0], out.to(dtype) if final else out)
        assert torch.equal(got[1], lse)
    first = attention_step(
        q, k, v, None, None, None, None, *lists, SCALE, False, kernel
    )
    assert not first[0].any() and first[0].shape == out.shape
    assert (first[1] == EMPTY).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "lists", [NO_LIMITS, NOTHING.to_lists(), ([], [], [1, 1], []), ([], [], [1, 0], [])]
)
def test_no_rows(kernel, lists):
    """A rank of an uneven sequence may hold no query."""
    q, k, v = operands(0, 5)
    out, lse = attention_step(
        q, k, v, None, None, None, None, *lists, SCALE, True, kernel
    )
    assert out.shape == (2, HEADS, 0, 6)
    assert lse.shape == (2, HEADS, 0)


def chain(inputs, counts, visible_of, kernel):
    """A step for each of the chunks of so many keys."""
    state, start = (None, None), 0
    for number, count in enumerate(counts):
        k, v = (x.narrow(2, start, count) for x in (inputs.k, inputs.v))
        visible = visible_of(start, count)
        state = attention_step(
            inputs.q,
            k,
            v,
            *state,
            None,
            None,
            *visible.to_lists(),
            SCALE,
            number + 1 == len(counts),
            kernel,
        )
        start += count
    return state


def check_chain(inputs, counts, visible_of, kernel):
    out, lse = chain(inputs, counts, visible_of, kernel)
    exact, exact_lse = attend(inputs.q, *inputs.whole())
    assert_close("out", out, exact, exact, plain(inputs).out)
    assert torch.equal(lse == EMPTY, exact_lse == EMPTY)
    return out


chunks = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)
kernels = st.sampled_from(KERNELS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
ROWS = 7


@settings(deadline=None)
@given(chunks, st.integers(-4, 20), st.booleans(), kernels, dtypes)
def test_a_chain_of_steps_is_one_attention(counts, q_start, causal, kernel, dtype):
    """The keys are at 0, 1, ..., the queries at q_start, q_start + 1, ..."""
    rows, keys = torch.arange(ROWS).unsqueeze(1), torch.arange(sum(counts))
    mask = keys <= q_start + rows if causal else torch.ones(ROWS, len(keys)).bool()
    inputs = Inputs.random(dtype, 2, (8, 6), mask, mask[:, :0])

    def visible_of(start, count):
        return visible_chunk(q_start, ROWS, start, count, count, causal)

    out = check_chain(inputs, counts, visible_of, kernel)
    assert out.dtype == dtype


@settings(deadline=None)
@given(chunks, st.integers(0, 20), st.integers(1, 9), kernels)
def test_a_window_that_crosses_chunks(counts, q_start, width, kernel):
    """Each row sees the key at its own position and width - 1 before it."""
    rows, keys = torch.arange(ROWS).unsqueeze(1), torch.arange(sum(counts))
    distance = q_start + rows - keys
    mask = (distance >= 0) & (distance < width)
    inputs = Inputs.random(torch.float64, 4, (8, 6), mask, mask[:, :0])

    def visible_of(start, count):
        upper = q_start - start + 1
        return Visible(upper=(upper,) * 2, lower=(upper - width,) * 2)

    check_chain(inputs, counts, visible_of, kernel)


OPCHECK_AXES = AXES | {
    "mask": ("all", "none", "causal", "parity", "vectors, slice"),
    "kv_heads": (2,),
    "dims": ((8, 6),),
    "sizes": ((11, 9),),
}


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize(
    "case", [StepCase(**values) for values in selected_cases(OPCHECK_AXES)], ids=str
)
def test_opcheck(case):
    inputs, limits = Inputs.of(case), case.limits
    arguments = (
        *(inputs.q, inputs.k, inputs.v, *earlier_state(case, inputs)),
        *(*limits.vectors(), *limits.visible.to_lists()),
        *(SCALE, case.final, case.kernel),
    )
    torch.library.opcheck(attention_step, (*arguments, torch.ones(3)))


def test_keywords_are_arguments_too():
    case = StepCase(final=True)
    inputs = Inputs.of(case)
    state = earlier_state(case, inputs)
    names = [x.name for x in attention_step._schema.arguments]
    values = (
        *(inputs.q, inputs.k, inputs.v, *state, None, None),
        *(*case.limits.visible.to_lists(), SCALE, True, case.kernel, None),
    )
    got = attention_step(**dict(zip(names, values, strict=True)))
    assert all(map(torch.equal, got, run(case, inputs, state)))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = attention_step(**dict(zip(names, values, strict=True)))
    assert out.dtype == case.dtype


def test_limits_that_are_no_pairs():
    inputs = Inputs.of(StepCase())
    with pytest.raises(ValueError, match="rows, keys, upper and lower: got"):
        attention_step(
            inputs.q,
            inputs.k,
            inputs.v,
            None,
            None,
            None,
            None,
            [],
            [1],
            [],
            [],
            SCALE,
            True,
            "aten_math",
        )


def test_a_kernel_that_does_not_exist():
    inputs = Inputs.of(StepCase())
    with pytest.raises(ValueError, match="'flash' is not a valid StepKernel"):
        attention_step(
            inputs.q,
            inputs.k,
            inputs.v,
            None,
            None,
            None,
            None,
            *NO_LIMITS,
            SCALE,
            True,
            "flash",
        )
