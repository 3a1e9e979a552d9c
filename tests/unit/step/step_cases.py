"""What one attention step is given, and what it has to return, in float64.

A case has two chunks of keys. The earlier one was met by the steps before; what these
found arrives as accumulators, computed here. The step that is tested meets the other.
The reference builds the scores of both chunks and an explicit mask, entry by entry.
Tolerances are those of Note [Derived tolerances]; the plain computation is one call of
F.scaled_dot_product_attention on both chunks in the dtype of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.ops.step.step_arguments import StepArguments, StepChunk
from tests.cpu.attention_cases import Attended, tolerance
from tests.support import bounds
from tests.support.pairwise import selected_cases

BATCH, HEADS, EARLIER_KEYS = 2, 4, 5
SCALE = 0.3


def mask_of(x: Visible, rows: int, keys: int) -> Tensor:
    """[rows, keys], True where a row sees a key, word for word from the docstring."""

    def sees(i: int, j: int) -> bool:
        return (
            (x.rows is None or x.rows[0] <= i < x.rows[1])
            and (x.keys is None or x.keys[0] <= j < x.keys[1])
            and (x.upper is None or j < i + x.upper[i % 2])
        )

    values = [[sees(i, j) for j in range(keys)] for i in range(rows)]
    return torch.tensor(values, dtype=torch.bool).view(rows, keys)


MASKS: dict[str, Callable[[int, int], Visible]] = {
    "all": lambda R, K: ALL,
    "none": lambda R, K: NOTHING,
    "causal": lambda R, K: Visible(upper=(1, 1)),
    "later rows": lambda R, K: Visible(upper=(4, 4)),
    "earlier rows": lambda R, K: Visible(upper=(-3, -3)),
    "parity": lambda R, K: Visible(upper=(1, 0)),
    "parity, other": lambda R, K: Visible(upper=(0, 1)),
    "parity, far": lambda R, K: Visible(upper=(-2, 5)),
    "rows": lambda R, K: Visible(rows=(R // 3, R)),
    "keys": lambda R, K: Visible(keys=(0, K - K // 3)),
    "causal slice": lambda R, K: Visible((1, R - 1), (K // 4, K), (3, 3)),
}


@dataclass(frozen=True)
class StepCase:
    """One step; `earlier` says which rows have met a key before."""

    kernel: str = "aten_flash"
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    kv_heads: int = 4
    dims: tuple[int, int] = (8, 8)
    sizes: tuple[int, int] = (11, 9)
    earlier: str = "every row"  # or "no row": accumulators of None; or "some rows"
    final: bool = False

    def __str__(self) -> str:
        """All fields, as an id for pytest."""
        values = (str(getattr(self, field.name)) for field in fields(self))
        return "-".join(values).replace("torch.", "")

    @property
    def arguments(self) -> StepArguments:
        """What the operators are told of the chunk."""
        return StepChunk.plain(SCALE, MASKS[self.mask](*self.sizes)).arguments()

    @property
    def accumulation(self) -> torch.dtype:
        """The dtype of accumulators, lse and delta."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


# Every two values of different axes meet, see tests/support/pairwise.py.
AXES = {
    "mask": tuple(MASKS),
    "kernel": ("aten_flash", "aten_math"),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "earlier": ("every row", "some rows", "no row"),
    "final": (True, False),
    "kv_heads": (4, 2, 1),
    "dims": ((8, 8), (7, 12), (16, 5)),
    "sizes": ((11, 9), (9, 11), (70, 40), (1, 6), (6, 1)),
}
# Both directions of a round of fold, on even and odd numbers of rows and keys.
FOLD_AXES = AXES | {
    "mask": ("parity", "parity, other"),
    "sizes": ((8, 8), (9, 9), (8, 9), (9, 8), (70, 71), (2, 2), (2, 1), (1, 2), (1, 1)),
}


def step_cases(*axes: dict[str, Sequence[Any]]) -> list[StepCase]:
    """Pairwise cases of each of these axes."""
    return [StepCase(**values) for x in axes for values in selected_cases(x)]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case in its dtype; k_0, v_0 and mask_0 are the earlier chunk."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    k_0: Tensor
    v_0: Tensor
    mask_0: Tensor

    @classmethod
    def of(cls, case: StepCase) -> Inputs:
        """Seeded; the same in every call."""
        rows, _ = case.sizes
        mask_0 = torch.ones(rows, EARLIER_KEYS, dtype=torch.bool)
        if case.earlier == "some rows":
            mask_0[: rows // 2 + 1] = False
        elif case.earlier == "no row":
            mask_0 = mask_0[:, :0]
        mask = mask_of(MASKS[case.mask](*case.sizes), *case.sizes)
        return cls.random(case.dtype, case.kv_heads, case.dims, mask, mask_0)

    @classmethod
    def random(
        cls,
        dtype: torch.dtype,
        kv_heads: int,
        dims: tuple[int, int],
        mask: Tensor,
        mask_0: Tensor,
    ) -> Inputs:
        """Seeded tensors of the sizes that the masks have."""
        (R, K), K_0, (D, E) = mask.shape, mask_0.shape[1], dims
        generator = torch.Generator().manual_seed(77)

        def normal(heads: int, tokens: int, dim: int) -> Tensor:
            shape = (BATCH, heads, tokens, dim)
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(dtype)

        return cls(
            normal(HEADS, R, E),
            normal(HEADS, R, D),
            normal(kv_heads, K, D),
            normal(kv_heads, K, E),
            mask,
            normal(kv_heads, K_0, D),
            normal(kv_heads, K_0, E),
            mask_0,
        )

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask of both chunks."""
        return (
            torch.cat([self.k_0, self.k], 2),
            torch.cat([self.v_0, self.v], 2),
            torch.cat([self.mask_0, self.mask], 1),
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """out and lse, computed in `dtype`; rows that see no key give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = (q.to(dtype) @ k.mT * SCALE).masked_fill(~mask, float("-inf"))
    p = scores.softmax(-1).masked_fill(~mask.any(1, keepdim=True), 0.0)
    return p @ v, scores.logsumexp(-1)


def gradients(inputs: Inputs, share: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in float64; `share`: what the later chunk contributes to them.

    With P = softmax and dP = grad v':  dv = P' grad,  dS = P (dP - grad . out) scale,
    dq = dS k,  dk = dS' q.
    """
    k, v, mask = inputs.whole()
    out, _ = attend(inputs.q, k, v, mask)
    G = k.shape[1]
    group = HEADS // G
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    grad, q = inputs.grad.double(), inputs.q.double()
    scores = (q @ k.mT * SCALE).masked_fill(~mask, float("-inf"))
    p = scores.softmax(-1).masked_fill(~mask.any(1, keepdim=True), 0.0)
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * SCALE
    if share:
        later = slice(inputs.k_0.shape[2], None)
        p, ds, k = p[..., later], ds[..., later], k[:, :, later]
    dk, dv = (x.unflatten(1, (G, group)).sum(2) for x in (ds.mT @ q, p.mT @ grad))
    return ds @ k, dk, dv


def plain(inputs: Inputs) -> Attended:
    """Both chunks at once, as torch computes them in the dtype of the case."""
    k, v, mask = inputs.whole()
    leaves = [x.clone().requires_grad_() for x in (inputs.q, k, v)]
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask, scale=SCALE, enable_gqa=k.shape[1] != HEADS
    )
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, inputs.grad))


def assert_close(
    name: str, got: Tensor, expected: Tensor, exact: Tensor, one_call: Tensor
) -> None:
    """Assert that `got` is `expected`, up to the error of `one_call` against `exact`.

    `expected` may have an accumulator more than `exact`: one more rounding.
    """
    assert got.is_contiguous()
    rounding = torch.finfo(got.dtype).eps / 2 * bounds.largest(expected)
    limit = tolerance(exact, one_call) + rounding
    bounds.check([bounds.deviation(name, got, expected, limit=limit)])
