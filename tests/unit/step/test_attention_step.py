"""cp::attention_step adds one chunk of keys to what the earlier steps found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import ALL, NOTHING, Visible, visible_chunk
from cpcompile.ops.step.step_arguments import ChunkLimits
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
@pytest.mark.parametrize("visible", VISIBLES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_no_tokens_passes_the_accumulators_on(kernel, visible, dtype):
    arguments = ChunkLimits(SCALE, visible).arguments()
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
    arguments = ChunkLimits(SCALE, visible).arguments()
    out, lse = attention_step(q, k, v, None, None, *arguments, True, kernel)
    assert out.shape == (2, HEADS, 0, 6)
    assert lse.shape == (2, HEADS, 0)


def chain(inputs, counts, visible_of, kernel):
    """A step for each of the chunks of so many keys."""
    state, start = (None, None), 0
    for number, count in enumerate(counts):
        k, v = (x.narrow(2, start, count) for x in (inputs.k, inputs.v))
        arguments = ChunkLimits(SCALE, visible_of(start, count)).arguments()
        final = number + 1 == len(counts)
        state = attention_step(inputs.q, k, v, *state, *arguments, final, kernel)
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


@pytest.mark.parametrize(
    "case", [StepCase(**values) for values in selected_cases(OPCHECK_AXES)], ids=str
)
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


@pytest.mark.parametrize("limits", [[1], [2, 1, 1, 0, 4, 8], [4, 1, 1], [1, 0, 4, 1]])
def test_limits_that_are_none(limits):
    inputs = Inputs.of(StepCase())
    arguments = ChunkLimits(SCALE).arguments()._replace(limits=limits)
    operands = (inputs.q, inputs.k, inputs.v, None, None)
    with pytest.raises(ValueError, match="make the list by Visible"):
        attention_step(*operands, *arguments, True, "aten_math")


def test_a_kernel_that_does_not_exist():
    inputs = Inputs.of(StepCase())
    operands = (inputs.q, inputs.k, inputs.v, None, None)
    arguments = ChunkLimits(SCALE).arguments()
    with pytest.raises(ValueError, match="'flash' is not a valid StepKernel"):
        attention_step(*operands, *arguments, True, "flash")
