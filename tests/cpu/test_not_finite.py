"""NaN and infinities in q, k or v come out where one device has them.

Note [What is defined]
What a query sees decides: a key that it does not see may be left out, or weigh 0, and
0 * inf is NaN. aten's own kernels do either, by blocks of keys. So there are two exact
results in float64, one that leaves hidden keys out and one that multiplies them by 0,
and every element of out has to be like one of them: NaN, inf, -inf, or finite and
close. Of gradients even aten's kernel makes other elements finite than autograd does
(its log-sum-exp of such rows is NaN or inf, by the number of keys): there a tensor has
elements that are not finite, or has none.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import largest

BATCH, HEADS, DIM = 1, 2, 8
VALUES = (float("nan"), float("inf"), float("-inf"))


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


def without_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, row by row on the keys that it sees."""
    rows = [
        dense(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        for i in range(q.shape[2])
    ]
    return torch.cat(rows, 2)


def with_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by a matrix of weights, 0 for hidden keys."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return dense(q, k, v, hidden)


def dense(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * DIM**-0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def kind(x: Tensor) -> Tensor:
    """0 for finite elements, 1 for NaN, 2 for inf and 3 for -inf."""
    return x.isnan() * 1 + (x == torch.inf) * 2 + (x == -torch.inf) * 3


def faults(got: list[Tensor], references: list[list[Tensor]]) -> list[str]:
    """By Note [What is defined]; both references are alike where all keys are seen."""
    found = []
    for name, x, *exact in zip(
        ("out", "dq", "dk", "dv"), got, *references, strict=True
    ):
        own, kinds = kind(x), [kind(y) for y in exact]
        if name != "out":
            if all(bool(y.any()) != bool(own.any()) for y in kinds):
                found.append(f"{name}: finite or not, other than both exact ones")
            continue
        wrong = torch.stack([own != y for y in kinds]).all(0)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            theirs = [y[tuple(where)].item() for y in exact]
            found.append(
                f"{name}: {int(wrong.sum())} elements, the first {where} is "
                f"{x[tuple(where)].item()}, exact {theirs}"
            )
        for y in exact:
            finite = x.isfinite() & y.isfinite()
            error = largest((x.double() - y)[finite])
            if error > 1e-4 * max(largest(y[finite]), 1.0):  # another number, not noise
                found.append(f"{name}: error {error:.3g} of finite elements")
    return found


def run(strategy: str, length: int, causal: bool) -> list[str]:
    torch._dynamo.reset()
    options = {"mesh": sequence_mesh(2), "strategy": strategy, "inner": "aot_eager"}

    @torch.compile(backend="cp", options=options)
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = []
    for which, name in enumerate("qkv"):
        for value in VALUES:
            for position in (3, length - 3):
                tensors = operands(length, which, value, position)
                exact = [x.double() for x in tensors]
                kinds = (without_hidden, with_zeros) if causal else (dense, dense)
                references = [differentiated(each, exact) for each in kinds]
                wrong = faults(differentiated(attend, tensors), references)
                place = f"{value} in {name} at {position}"
                found += [f"{place}: {x}" for x in wrong]
    return found


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_what_is_not_finite_is_that_of_one_device(pools, strategy, length, causal):
    for found in pools[2].run(run, strategy, length, causal, timeout=90):
        assert not found, "\n".join(found)
