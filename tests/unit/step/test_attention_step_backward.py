"""The two backwards of a step against one reference; see Note [Two forms ...].

lse and out, which a backward is given, are those of all keys, and the gradients are the
shares of one chunk of them.
"""

import pytest
import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.ops.step.step_arguments import ChunkLimits
from tests.support.bounds import check, deviation
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
    gradients,
    plain,
)

KERNELS = ["aten_flash", "aten_math"]

step_dkdv = torch.ops.cp.attention_step_dkdv.default
step_dq = torch.ops.cp.attention_step_dq.default
step_backward = torch.ops.cp.attention_step_backward.default
FORMS = [step_dkdv, step_dq, step_backward]
NAMES = ("dq", "dk", "dv")


def arguments(case, inputs, form):
    """The arguments of one of the operators, all but `after`."""
    out, lse = attend(inputs.q, *inputs.whole())
    delta = (inputs.grad.double() * out).sum(-1)
    lse, delta = lse.to(case.accumulation), delta.to(case.accumulation)
    dq, dk, dv = accumulators(case, inputs)
    qkv = (inputs.grad, inputs.q, inputs.k, inputs.v)
    told, how = case.arguments, (case.final, case.kernel)
    return {
        step_dkdv: (*qkv, lse, delta, dk, dv, *told, *how),
        step_dq: (*qkv, lse, delta, dq, *told, *how),
        step_backward: (*qkv, out.to(case.dtype), lse, dq, *told, False, *how),
    }[form]


def accumulators(case, inputs):
    """What the earlier steps added up, of order 1; None before the first of them."""
    if case.earlier == "no row":
        return [None] * 3
    generator = torch.Generator().manual_seed(3)
    shapes = (inputs.q.shape, inputs.k.shape, inputs.v.shape)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(case.accumulation)
        for s in shapes
    ]


RESULTS = {
    step_dkdv: ("dk", "dv"),
    step_dq: ("dq",),
    step_backward: (*NAMES, "dbias"),
}


def check_step(case, form):
    inputs = Inputs.of(case)
    got = form(*arguments(case, inputs, form))
    got = dict(zip(RESULTS[form], [got] if form is step_dq else got, strict=True))
    assert not got.pop("dbias", inputs.q[:0]).numel()
    one_call = plain(inputs)
    parts = (
        *(NAMES, gradients(inputs, share=True), accumulators(case, inputs)),
        gradients(inputs, share=False),
    )
    for name, expected, accumulator, exact in zip(*parts, strict=True):
        if name not in got:
            continue
        # The joint form leaves it to others to add up dk and dv.
        adds = form is not step_backward or name == "dq"
        if adds and accumulator is not None:
            expected = expected + accumulator
        rounds = adds and case.final
        assert got[name].dtype == (case.dtype if rounds else case.accumulation)
        assert_close(name, got[name], expected, exact, getattr(one_call, name))


def all_cases(**axes):
    return [StepCase(**values) for values in selected_cases(AXES | axes)]


@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("form", [step_dkdv, step_dq], ids=str)
def test_the_split_form(case, form):
    check_step(case, form)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_the_joint_form(case):
    check_step(case, step_backward)


@in_pairs(
    {
        "mask": tuple(MASKS),
        "form": FORMS,
        "earlier": AXES["earlier"],
        "kernel": KERNELS,
    }
)
def test_every_mask(form, mask, earlier, kernel):
    check_step(StepCase(kernel=kernel, mask=mask, earlier=earlier, kv_heads=2), form)


@pytest.mark.parametrize("case", fold_cases(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fold(form, case):
    check_step(case, form)


def test_the_reference_is_the_gradient():
    inputs = Inputs.of(StepCase(dtype=torch.float64, mask="window", kv_heads=2))
    k, v, mask = inputs.whole()
    leaves = [x.requires_grad_() for x in (inputs.q, k, v)]
    out, _ = attend(*leaves, mask)
    expected = torch.autograd.grad(out, leaves, inputs.grad)
    found = zip(NAMES, gradients(inputs, share=False), expected, strict=True)
    check([deviation(*each) for each in found])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "parity", "rows"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_argument_is_written_to_or_returned(form, kernel, mask):
    case = StepCase(kernel=kernel, mask=mask)
    given = arguments(case, Inputs.of(case), form)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    copies = [x.clone() for x in tensors]
    results = form(*given)
    results = [results] if form is step_dq else results
    assert all(map(torch.equal, tensors, copies))
    addresses = {x.data_ptr() for x in tensors}
    assert addresses.isdisjoint(x.data_ptr() for x in results)


CAUSAL, PARITY = Visible(upper=(1, 1)), Visible(upper=(1, 0))
NO_ROWS = [NOTHING, CAUSAL, PARITY]


def operands(rows, keys):
    """grad, q, k, v, out, lse, delta and accumulators of dq, dk and dv."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, out = (
        (2, HEADS, rows, 8),
        (2, 2, keys, 8),
        (2, 2, keys, 6),
        (2, HEADS, rows, 6),
    )
    shapes = (out, q, k, v, out, q[:3], q[:3], q, k, v)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lists", [ALL, NOTHING, CAUSAL, PARITY], ids=str)
def test_a_chunk_of_no_tokens_passes_the_accumulators_on(kernel, lists):
    check_nothing_is_added(kernel, lists, rows=7, keys=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lists", [ALL, *NO_ROWS], ids=str)
def test_no_rows_pass_the_accumulators_on(kernel, lists):
    """A rank of an uneven sequence may hold no query."""
    check_nothing_is_added(kernel, lists, rows=0, keys=5)


def check_nothing_is_added(kernel, visible, rows, keys):
    grad, q, k, v, out, lse, delta, dq, dk, dv = operands(rows, keys)
    told, how = ChunkLimits(SCALE, visible).arguments(), (False, kernel)
    qkv = (grad, q, k, v)
    got = step_dkdv(*qkv, lse, delta, dk, dv, *told, *how)
    assert torch.equal(got[0], dk) and torch.equal(got[1], dv)
    assert torch.equal(step_dq(*qkv, lse, delta, dq, *told, *how), dq)
    joint = step_backward(*qkv, out, lse, dq, *told, False, *how)
    assert torch.equal(joint[0], dq)
    assert not joint[1].any() and not joint[2].any()


OPCHECK_AXES = {
    "mask": ("all", "none", "causal", "parity"),
    "kv_heads": (2,),
    "dims": ((8, 6),),
    "sizes": ((11, 9),),
}


@pytest.mark.parametrize("case", all_cases(**OPCHECK_AXES), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_opcheck(case, form):
    given = arguments(case, Inputs.of(case), form)
    torch.library.opcheck(form, (*given, torch.ones(3)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_opcheck_with_vectors(form):
    case = StepCase(mask="vectors, slice", kv_heads=2)
    torch.library.opcheck(form, arguments(case, Inputs.of(case), form))
