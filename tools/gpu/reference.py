"""References for the step kernels: float64, and the same dtype by plain math.

Legend as in cpcompile/kernels/launch.py. All of it is plain torch, on the device of its
arguments; float64 goes head by head, so that long sequences fit.

Note [Error of a step]
A result may have twice the error of the same attention in the same dtype by SDPA's math
(a step rounds the probabilities to the dtype once, which math does not), each row of it
compared with that row. These are added to the error of the reference:

    u max|row|          the rounding of the result to the dtype, u its unit roundoff
    D 2^-24 max|all, 1| sums of D products of numbers of size 1 in float32, where a row
                        is 0 by cancellation

In tf32, math multiplies what tensor cores multiply: float32 cut to 10 bits behind the
point. Cutting errs to one side, so that errors add up where those of rounding cancel.

Rows are the last dimension: of a query for out and dq, of a key for dk and dv. So one
key or row too many or too few shows, also where a row sees a thousand others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.geometry.visibility import Visible

UNITS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24, "tf32": 2**-11}
UNIT_FLOAT32 = 2**-24
ALLOWED_RATIO = 2.0


@dataclass(frozen=True)
class Changed:
    """A softcap, 0 for none, and what dropout multiplies the weights by, float32.

    added_BHRK: added to the scores after the softcap, float32; it has a gradient.
    sigmoid: whether a score_mod takes the sigmoid of scores, instead of a softcap.
    """

    softcap: float = 0.0
    factors_BHRK: Tensor | None = None
    added_BHRK: Tensor | None = None
    sigmoid: bool = False

    def of_head(self, b: int, h: int) -> Tensor:
        """Return the factors [R, K] of a head, or 1."""
        return torch.ones(()) if self.factors_BHRK is None else self.factors_BHRK[b, h]

    def of_first(self, keys: int) -> Changed:
        """Return the same changes for the first keys."""
        factors, added = (
            None if x is None else x[..., :keys]
            for x in (self.factors_BHRK, self.added_BHRK)
        )
        return replace(self, factors_BHRK=factors, added_BHRK=added)


UNCHANGED = Changed()


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a key of UNITS; tf32 is how float32 is multiplied."""
    return torch.float32 if name == "tf32" else getattr(torch, name)


def seen(
    visible: Visible,
    upper_rows_R: Tensor | None,
    lower_rows_R: Tensor | None,
    rows: int,
    keys: int,
    device: str,
) -> Tensor:
    """Return [R, K], true where a row sees a key: the definition in `Visible` again."""
    i = torch.arange(rows, device=device)[:, None]
    j = torch.arange(keys, device=device)[None, :]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if visible.rows is not None:
        mask &= (i >= visible.rows[0]) & (i < visible.rows[1])
    if visible.keys is not None:
        mask &= (j >= visible.keys[0]) & (j < visible.keys[1])
    for limits, vector, is_upper in (
        (visible.upper, upper_rows_R, True),
        (None, lower_rows_R, False),
    ):
        if vector is not None:
            limit = vector[:, None]
        elif limits is not None:
            limit = i + torch.where(i % 2 == 0, limits[0], limits[1])
        else:
            continue
        mask &= (j < limit) if is_upper else (j >= limit)
    return mask


@torch.no_grad()
def exact(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    grad_BHRE: Tensor | None,
    mask_RK: Tensor,
    scale: float,
    earlier: int = 0,
    changes: Changed = UNCHANGED,
) -> dict[str, Tensor]:
    """Compute out, lse and, given `grad`, dq, dk and dv, all in float64.

    Rows that see nothing have out 0 and lse -inf. dq_before is what the first `earlier`
    keys add to dq; dadded the gradient of what is added.
    """
    cap, added = changes.softcap, changes.added_BHRK
    (B, H, R, D), (_, G, K, E) = q_BHRD.shape, v_BGKE.shape
    options = {"dtype": torch.float64, "device": q_BHRD.device}
    found = {"out": torch.empty(B, H, R, E, **options)}
    found["lse"] = torch.empty(B, H, R, **options)
    if grad_BHRE is not None:
        found["dq"], found["dq_before"] = torch.empty(2, B, H, R, D, **options)
        found["dk"] = torch.zeros(B, G, K, D, **options)
        found["dv"] = torch.zeros(B, G, K, E, **options)
        if added is not None:
            found["dadded"] = torch.empty(B, H, R, K, **options)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            q, k, v = q_BHRD[b, h].double(), k_BGKD[b, g].double(), v_BGKE[b, g]
            v = v.double()
            scores = scale * (q @ k.mT)
            if cap:
                scores = cap * torch.tanh(scores / cap)
            slope = 1 - (scores / cap) ** 2 if cap else 1.0
            if changes.sigmoid:
                scores = torch.sigmoid(scores)
                slope = scores * (1 - scores)
            if added is not None:
                scores = scores + added[b, h].double()
            scores = scores.masked_fill_(~mask_RK, -math.inf)
            lse = scores.logsumexp(-1)
            p = scores.sub_(lse[:, None]).exp_().masked_fill_(~mask_RK, 0.0)
            kept = changes.of_head(b, h).double()
            out = (p * kept) @ v
            found["out"][b, h], found["lse"][b, h] = out, lse
            if grad_BHRE is None:
                continue
            grad = grad_BHRE[b, h].double()
            delta = (grad * out).sum(-1, keepdim=True)
            ds = p * (grad @ v.mT * kept - delta)
            if added is not None:
                found["dadded"][b, h] = ds
            ds = ds * scale * slope
            found["dq"][b, h] = ds @ k
            found["dq_before"][b, h] = ds[:, :earlier] @ k[:earlier]
            found["dk"][b, g] += ds.mT @ q
            found["dv"][b, g] += (p * kept).mT @ grad
    return found


def rough(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    grad_BHRE: Tensor | None,
    mask_RK: Tensor,
    scale: float,
    changes: Changed = UNCHANGED,
    dtype: str = "",
) -> dict[str, Tensor]:
    """Compute out and, given `grad`, dq, dk and dv by SDPA's math in the dtype of q.

    dtype: "tf32" for its products of float32.
    """
    group = q_BHRD.shape[1] // k_BGKD.shape[1]
    if changes.added_BHRK is not None:
        leaf = changes.added_BHRK.detach().requires_grad_()
        changes = replace(changes, added_BHRK=leaf)
    sees_any = mask_RK.any(-1, keepdim=True)
    q, k, v = (x.detach().requires_grad_() for x in (q_BHRD, k_BGKD, v_BGKE))
    mask = mask_RK | ~sees_any  # softmax of nothing has no gradient
    heads = [x.repeat_interleave(group, 1) for x in (k, v)]
    if changes is UNCHANGED and dtype != "tf32":
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, *heads, attn_mask=mask, scale=scale)
    else:
        product = torch.matmul if dtype != "tf32" else _ProductInTf32.apply
        out = _rough_changed(q, *heads, mask, scale, changes, product)
    out = out * sees_any
    found = {"out": out.detach()}
    if grad_BHRE is not None:
        leaves = {"dq": q, "dk": k, "dv": v}
        if changes.added_BHRK is not None:
            leaves["dadded"] = changes.added_BHRK
        grads = torch.autograd.grad(out, [*leaves.values()], grad_BHRE)
        found |= dict(zip(leaves, grads, strict=True))
    return found


def _rough_changed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    changes: Changed,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Do what SDPA's math would do: in float32 (float64), and rounded at the end."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * product(q.to(wide), k.to(wide).mT)
    if changes.softcap:
        scores = changes.softcap * torch.tanh(scores / changes.softcap)
    if changes.sigmoid:
        scores = torch.sigmoid(scores)
    if changes.added_BHRK is not None:
        scores = scores + changes.added_BHRK
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    if changes.factors_BHRK is not None:
        weights = weights * changes.factors_BHRK
    return product(weights, v.to(wide)).to(q.dtype)


class _ProductInTf32(torch.autograd.Function):
    """The product of two float32 matrices as tensor cores multiply them."""

    @staticmethod
    def forward(context: Any, a: Tensor, b: Tensor) -> Tensor:
        context.save_for_backward(a, b)
        return _cut(a) @ _cut(b)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = context.saved_tensors
        return _cut(grad) @ _cut(b.mT), _cut(a.mT) @ _cut(grad)


def _cut(x: Tensor) -> Tensor:
    """Return float32 without the 13 bits that tf32 does not have."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def error_ratio(
    got: Tensor, rough: Tensor, exact: Tensor, dtype: str, *, by_row: bool = True
) -> float:
    """Return the ratio of Note [Error of a step]; inf for what is not finite.

    It is fine up to ALLOWED_RATIO. Without `by_row` the largest errors of all rows are
    compared: for a backward from an output that was rounded, as that leaves of a row of
    zeros what the rounding happens to be.
    """
    if not got.isfinite().all():
        return math.inf
    if not exact.numel():
        return 0.0
    error, expected, size = (
        x.abs().amax(-1) for x in (got.double() - exact, rough.double() - exact, exact)
    )
    if not by_row:
        error, expected, size = error.max(), expected.max(), size.max()
    allowed = expected + UNITS[dtype] * size
    allowed += exact.shape[-1] * UNIT_FLOAT32 * size.max().clamp(min=1.0)
    return float((error / allowed).max())


def lse_ratio(got: Tensor, exact: Tensor, dtype: str) -> float:
    """Return the ratio for the log-sum-exp, which math does not give.

    Its unit is a relative 2^-16, for tf32 2^-10. One key more among a thousand changes
    it by ten times 2^-16.
    """
    finite = exact.isfinite()
    right = torch.equal(got.isfinite(), finite)
    if not right or bool((got[~finite] != -math.inf).any()):
        return math.inf
    if not finite.any():
        return 0.0
    unit = 2**-10 if dtype == "tf32" else 2**-16
    error = (got.double() - exact)[finite].abs()
    return float((error / (unit * (1 + exact[finite].abs()))).max())


def for_json(ratios: Mapping[str, float]) -> dict[str, float | str]:
    """Replace infinities by words, as JSON has none."""
    return {n: x if math.isfinite(x) else "not finite" for n, x in ratios.items()}
