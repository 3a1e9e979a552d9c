"""The parts of a step's backward against one reference; see Note [Two forms ...].

lse and out, which a backward is given, are those of all keys, and the gradients are the
shares of one chunk of them.
"""

import pytest
import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.ops.step.step_arguments import StepChunk
from tests.support.bounds import check, deviation
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
    gradients,
    plain,
    step_cases,
)

KERNELS = ["aten_flash", "aten_math"]
RESULTS = {"dkdv": ("dk", "dv"), "dq": ("dq",), "all": ("dq", "dk", "dv")}

step_backward = torch.ops.cp.attention_step_backward.default


def arguments(case, inputs, parts):
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
    got = step_backward(*arguments(case, inputs, parts))
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


@in_pairs(
    {
        "mask": tuple(MASKS),
        "parts": tuple(RESULTS),
        "earlier": AXES["earlier"],
        "kernel": KERNELS,
    }
)
def test_every_mask(parts, mask, earlier, kernel):
    check_step(StepCase(kernel=kernel, mask=mask, earlier=earlier, kv_heads=2), parts)


def test_the_reference_is_the_gradient():
    inputs = Inputs.of(StepCase(dtype=torch.float64, mask="causal slice", kv_heads=2))
    k, v, mask = inputs.whole()
    leaves = [x.requires_grad_() for x in (inputs.q, k, v)]
    out, _ = attend(*leaves, mask)
    expected = torch.autograd.grad(out, leaves, inputs.grad)
    found = zip(RESULTS["all"], gradients(inputs, share=False), expected, strict=True)
    check([deviation(*each) for each in found])


@pytest.mark.parametrize("parts", RESULTS)
@pytest.mark.parametrize("mask", ["none", "causal", "parity", "rows"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_argument_is_written_to_or_returned(parts, kernel, mask):
    case = StepCase(kernel=kernel, mask=mask)
    given = arguments(case, Inputs.of(case), parts)
    tensors = [*given[:6], *given[6]]
    copies = [x.clone() for x in tensors]
    results = step_backward(*given)
    assert all(map(torch.equal, tensors, copies))
    addresses = {x.data_ptr() for x in tensors}
    assert addresses.isdisjoint(x.data_ptr() for x in results)


def operands(rows, keys):
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
    *saved, delta, out, dq, dk, dv = operands(rows, keys)
    rest = (*StepChunk.plain(SCALE, visible).arguments(), False, kernel)
    got = step_backward(*saved, delta, [dk, dv], "dkdv", *rest)
    assert torch.equal(got[0], dk) and torch.equal(got[1], dv)
    assert torch.equal(step_backward(*saved, delta, [dq], "dq", *rest)[0], dq)
    joint = step_backward(*saved, out, [dq], "all", *rest)
    assert torch.equal(joint[0], dq)
    assert not joint[1].any() and not joint[2].any()


OPCHECK_AXES = {
    "mask": ("all", "none", "causal", "parity"),
    "kv_heads": (2,),
    "dims": ((8, 6),),
    "sizes": ((11, 9),),
}


@pytest.mark.parametrize("case", step_cases(AXES | OPCHECK_AXES), ids=str)
@pytest.mark.parametrize("parts", RESULTS)
def test_opcheck(case, parts):
    given = arguments(case, Inputs.of(case), parts)
    torch.library.opcheck(step_backward, (*given, torch.ones(3)))
