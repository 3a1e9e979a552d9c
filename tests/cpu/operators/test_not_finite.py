"""NaN and infinities in q, k or v come out where one device has them.

Note [What is defined]
What a query sees decides: a key that it does not see may be left out, or weigh 0, and
0 * inf is NaN. aten's own kernels do either, by blocks of keys. So there are two exact
results in float64, one that leaves hidden keys out and one that multiplies them by 0.
A mask that is a tensor is added to the scores in torch, -inf where a key is hidden, and
NaN - inf and inf - inf are NaN: a third one. Every element of out has to be like one of
them: NaN, inf, -inf, or finite and close. Of gradients even aten's kernel makes other
elements finite than autograd does (its log-sum-exp of such rows is NaN or inf, by the
number of keys): there a tensor has elements that are not finite, or has none.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import OPERAND_SCALE, deviation

BATCH, HEADS, DIM = 1, 2, 8
VALUES = (float("nan"), float("inf"), float("-inf"))
NAMES = ("out", "dq", "dk", "dv")


def operands(length: int, which: int, value: float, position: int) -> list[Tensor]:
    """q, k, v, one element of which is `value`, and the gradient of out."""
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH, HEADS, length, DIM)
    tensors = [torch.randn(shape, generator=generator) for _ in range(4)]
    tensors[which][0, 0, position, 2] = value
    return tensors


def differentiated(attend, tensors: list[Tensor]) -> list[Tensor]:
    *leaves, grad = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def seen_keys(kind: str, length: int) -> Tensor:
    """[queries, keys], True where a query sees a key."""
    row, key = torch.arange(length)[:, None], torch.arange(length)
    if kind == "window":  # and its middle is another document
        document = (torch.arange(length) >= length // 2).long()
        same = document[:, None] == document
        return (row >= key) & (row < key + 5) & same
    return row >= key if kind == "causal" else torch.ones(length, length).bool()


def without_hidden(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention row by row, on the keys that a row sees."""
    rows = [
        dense(q[:, :, i : i + 1], k[:, :, keys], v[:, :, keys])
        for i, keys in enumerate(seen)
    ]
    return torch.cat(rows, 2)


def with_zeros(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention by a matrix of weights, 0 for hidden keys."""
    return dense(q, k, v, ~seen)


def with_bias(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention whose scores of hidden keys get -inf added, as torch does it."""
    scores = q @ k.mT * DIM**-0.5
    scores = scores + torch.zeros_like(scores).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def dense(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * DIM**-0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def kind(x: Tensor) -> Tensor:
    """0 for finite elements, 1 for NaN, 2 for inf and 3 for -inf."""
    return x.isnan() * 1 + (x == torch.inf) * 2 + (x == -torch.inf) * 3


def faults(
    got: list[Tensor], references: list[list[Tensor]], rough: list[list[Tensor]]
) -> list[str]:
    """By Note [What is defined]; references are alike where all keys are seen.

    rough: the references in float32.
    """
    found = []
    for index, (name, x) in enumerate(zip(NAMES, got, strict=True)):
        exact, usual = ([each[index] for each in y] for y in (references, rough))
        own, kinds = kind(x), [kind(y) for y in exact]
        if name != "out":
            if all(bool(y.any()) != bool(own.any()) for y in kinds):
                found.append(f"{name}: finite or not, other than all exact ones")
            continue
        wrong = torch.stack([own != y for y in kinds]).all(0)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            theirs = [y[tuple(where)].item() for y in exact]
            found.append(
                f"{name}: {int(wrong.sum())} elements, the first {where} is "
                f"{x[tuple(where)].item()}, exact {theirs}"
            )
        for y, z in zip(exact, usual, strict=True):
            finite = x.isfinite() & y.isfinite() & z.isfinite()
            what = f"finite elements of {name}"
            error = deviation(what, x[finite], y[finite], z[finite], OPERAND_SCALE)
            found += [] if error.is_allowed else [str(error)]
    return found


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@on_ranks(2)
def test_what_is_not_finite_is_that_of_one_device(strategy, length, mask):
    options = {"mesh": sequence_mesh(2), "strategy": strategy, "inner": "aot_eager"}
    causal = mask == "causal"

    @torch.compile(backend="cp", options=options)
    def attend(q, k, v):
        given = seen_keys(mask, q.shape[2]) if mask == "window" else None
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=causal)

    found = []
    seen = seen_keys(mask, length)
    kinds = [without_hidden, with_zeros] + [with_bias] * (mask == "window")
    for which, name in enumerate("qkv"):
        for value in VALUES:
            for position in (3, length - 3):
                tensors = operands(length, which, value, position)
                references, rough = (
                    [differentiated(functools.partial(f, seen=seen), x) for f in kinds]
                    for x in ([x.double() for x in tensors], tensors)
                )
                wrong = faults(differentiated(attend, tensors), references, rough)
                place = f"{value} in {name} at {position}"
                found += [f"{place}: {x}" for x in wrong]
    assert not found, "\n".join(found)
