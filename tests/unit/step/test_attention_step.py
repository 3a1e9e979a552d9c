"""One chunk of keys; see Note [Two forms of the backward]."""

import pytest
import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.kernels.constants import RowLimits
from cpcompile.ops.step.lowering import _Step
from cpcompile.ops.step.step_arguments import StepChunk
from tests.cpu.attention_cases import lse_tolerance
from tests.support.bounds import check as check_bounds
from tests.support.bounds import deviation
from tests.unit.step.step_cases import (
    AXES,
    FOLD_AXES,
    HEADS,
    SCALE,
    Inputs,
    StepCase,
    assert_close,
    attend,
    gradients,
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


CAUSAL = Visible(upper=(1, 1))


def test_a_step_by_a_template():
    arguments = StepChunk.plain(0.5, CAUSAL).arguments()
    step = _Step.read(*arguments, True, "triton", "a message")
    assert step == _Step(RowLimits(CAUSAL), 0.5, True, "a message")
    step = _Step.read([], [], "a node", [], [], "scale=0.5", False, "triton")
    assert step == _Step(RowLimits(upper="a node"), 0.5, False, None)


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        ("scale=0.5", "aten_flash"),
        ("scale=0.5", "aten_math"),
        ("scale=0.5 +bias", "triton"),
        ("scale=0.5 +key_ranges", "triton"),
        ("scale=0.5 softcap=1.0", "triton"),
    ],
)
def test_others_are_left_to_the_operator(spec, kernel):
    assert _Step.read([], [], None, [], [], spec, False, kernel) is None


RESULTS = {"dkdv": ("dk", "dv"), "dq": ("dq",), "all": ("dq", "dk", "dv")}

step_backward = torch.ops.cp.attention_step_backward.default


def backward_arguments(case, inputs, parts):
    """The arguments of the operator, all but `after`."""
    out, lse = attend(inputs.q, *inputs.whole())
    rows = (inputs.grad.double() * out).sum(-1).to(case.accumulation)
    if parts == "all":
        rows = out.to(case.dtype)
    qkv = (inputs.grad, inputs.q, inputs.k, inputs.v)
    before = accumulators(case, inputs)
    sums = [before[name] for name in added_to(parts) if name in before]
    saved = (*qkv, lse.to(case.accumulation), rows, sums)
    return (*saved, parts, *case.arguments, case.final, case.kernel)


def added_to(parts):
    """Of all gradients dq; others add up dk and dv."""
    return ("dq",) if parts == "all" else RESULTS[parts]


def accumulators(case, inputs):
    """What the earlier steps added up, of order 1; none before the first of them."""
    if case.earlier == "no row":
        return {}
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(
            case.accumulation
        )
        for name, x in zip(RESULTS["all"], (inputs.q, inputs.k, inputs.v), strict=True)
    }


def check_step(case, parts):
    inputs = Inputs.of(case)
    got = step_backward(*backward_arguments(case, inputs, parts))
    shares, wholes = (
        dict(zip(RESULTS["all"], gradients(inputs, share), strict=True))
        for share in (True, False)
    )
    one_call, before = plain(inputs), accumulators(case, inputs)
    for name, x in zip(RESULTS[parts], got, strict=True):
        adds = name in added_to(parts)
        expected = shares[name] + before.get(name, 0) if adds else shares[name]
        assert x.dtype == (case.dtype if adds and case.final else case.accumulation)
        assert_close(name, x, expected, wholes[name], getattr(one_call, name))


@pytest.mark.parametrize("case", step_cases(AXES, FOLD_AXES), ids=str)
@pytest.mark.parametrize("parts", RESULTS)
def test_gradients(parts, case):
    check_step(case, parts)


def test_the_reference_is_the_gradient():
    inputs = Inputs.of(StepCase(dtype=torch.float64, mask="causal slice", kv_heads=2))
    k, v, mask = inputs.whole()
    leaves = [x.requires_grad_() for x in (inputs.q, k, v)]
    out, _ = attend(*leaves, mask)
    expected = torch.autograd.grad(out, leaves, inputs.grad)
    found = zip(RESULTS["all"], gradients(inputs, share=False), expected, strict=True)
    check_bounds([deviation(*each) for each in found])


@pytest.mark.parametrize("parts", RESULTS)
@pytest.mark.parametrize("mask", ["none", "causal", "parity", "rows"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_argument_of_the_backward_is_written_to_or_returned(parts, kernel, mask):
    case = StepCase(kernel=kernel, mask=mask)
    given = backward_arguments(case, Inputs.of(case), parts)
    tensors = [*given[:6], *given[6]]
    copies = [x.clone() for x in tensors]
    results = step_backward(*given)
    assert all(map(torch.equal, tensors, copies))
    addresses = {x.data_ptr() for x in tensors}
    assert addresses.isdisjoint(x.data_ptr() for x in results)


def backward_operands(rows, keys):
    """grad, q, k, v, lse, delta and out; accumulators of dq, dk and dv."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, out = (
        (2, HEADS, rows, 8),
        (2, 2, keys, 8),
        (2, 2, keys, 6),
        (2, HEADS, rows, 6),
    )
    shapes = (out, q, k, v, q[:3], q[:3], out, q, k, v)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("upper", [None, (1, 1), (1, 0)], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(7, 0), (0, 5), (7, 5)])
def test_accumulators_are_passed_on(kernel, upper, rows, keys):
    """A rank of an uneven sequence may hold no query, or no key; or sees none."""
    visible = (
        NOTHING if rows and keys else ALL if upper is None else Visible(upper=upper)
    )
    *saved, delta, out, dq, dk, dv = backward_operands(rows, keys)
    rest = (*StepChunk.plain(SCALE, visible).arguments(), False, kernel)
    got = step_backward(*saved, delta, [dk, dv], "dkdv", *rest)
    assert torch.equal(got[0], dk) and torch.equal(got[1], dv)
    assert torch.equal(step_backward(*saved, delta, [dq], "dq", *rest)[0], dq)
    joint = step_backward(*saved, out, [dq], "all", *rest)
    assert torch.equal(joint[0], dq)
    assert not joint[1].any() and not joint[2].any()


BACKWARD_OPCHECK_AXES = {
    "mask": ("all", "none", "causal", "parity"),
    "kv_heads": (2,),
    "dims": ((8, 6),),
    "sizes": ((11, 9),),
}


@pytest.mark.parametrize("case", step_cases(AXES | BACKWARD_OPCHECK_AXES), ids=str)
@pytest.mark.parametrize("parts", RESULTS)
def test_opcheck_of_the_backward(case, parts):
    given = backward_arguments(case, Inputs.of(case), parts)
    torch.library.opcheck(step_backward, (*given, torch.ones(3)))
