"""What a step of attention is compared with, and how closely.

Legend as in cpcompile/kernels/launch.py. A step continues from what an earlier chunk of
keys left, so the reference is one softmax over the keys of both, with the mask of
the references of `tools.gpu`, and autograd gives its gradients.

Note [Rounding of a step]
Errors are compared element by element with what rounding can do at most. Let u be the
unit roundoff of the operands' dtype (0 for float32: nothing is rounded to it), v that
of float32. A sum of n products has an error below n v sum|x y|. Hence

    scores      (D + 8) v (scale |q| |k| + |lse|), the relative error of p = exp(...)
    out         sums of p v, where p is rounded once: (u + error of p) p |v|
    dv          the same sum over rows: (u + error of p) p |grad|
    ds          p (dp - delta): (u + error of p) |ds| + p error of dp
    dp          (E + 8) v (|grad| |v| + |delta|)
    dk, dq      scale times error of ds times |q|, |k|

A softcap c adds 4 v c to the error of a score, as shared.py.jinja computes tanh, and ds
is multiplied by 1 - t^2, whose error is 2 t times that of t = score / c. Dropout
multiplies p and dp by 0 or 1 / (1 - dropout_p), and their errors with them. A bias is
part of the score; dbias sums ds before the slope of a softcap.

plus (number of terms) v for the sum over tiles, and u once more for a final result.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.kernels.configs import StepConfig
from cpcompile.kernels.constants import (
    BiasConstants,
    DropoutConstants,
    ScoreModifiers,
)
from cpcompile.ops.step.dropout import SEED_LIMIT, Dropout
from tools.gpu.reference import seen

BEYOND = 5  # tokens of the sequences after those of the step


@dataclass(frozen=True)
class StepBias:
    """A table [B, H, n] in float32, of `kv_len` keys or of distances to `q_len` rows.

    The keys of an earlier chunk, of which a step knows only out and lse, are the first
    of the sequence. rows_R, keys_K: positions of those of the step. row_shift_BHR:
    float32, a number for every row, which is subtracted from its bias.
    """

    table: Tensor
    by_key: bool
    rows_R: Tensor
    keys_K: Tensor
    row_shift_BHR: Tensor

    @classmethod
    def of(
        cls, kind: str, heads: tuple[int, int], rows_R: Tensor, keys_K: Tensor
    ) -> "StepBias":
        """Random numbers; kind has "key" or "distance", and "hidden" for some -inf."""
        draw = torch.Generator().manual_seed(7)
        q_len, kv_len = (int(x.max()) + 1 + BEYOND for x in (rows_R, keys_K))
        by_key = "key" in kind
        count = kv_len if by_key else q_len + kv_len - 1
        table = 2 * torch.randn(*heads, count, generator=draw)
        if "hidden" in kind:
            table[torch.rand(table.shape, generator=draw) < 0.2] = -torch.inf
            table[..., : count // 3] = -torch.inf  # whole tiles of some rows
        row_shift = torch.randn(*heads, len(rows_R), generator=draw)
        return cls(table, by_key, rows_R, keys_K, row_shift)

    def entries(self, keys: Tensor) -> Tensor:
        """[R, keys], which entry a pair reads."""
        if self.by_key:
            return keys.expand(len(self.rows_R), -1)
        return keys + self._offsets[:, None]

    def added(self, keys: Tensor) -> Tensor:
        """[B, H, R, keys] in float64: the bias without what its row is shifted by."""
        bias = self.table.double()[..., self.entries(keys)]
        return bias - self.row_shift_BHR.double()[..., None]

    def biasing(self) -> BiasConstants:
        offsets = None if self.by_key else self._offsets.int()
        return BiasConstants(self.table, self.keys_K.int(), offsets, self.row_shift_BHR)

    def sums(self, pairs: Tensor) -> Tensor:
        """Numbers [B, H, R, K] of the pairs of a step, summed as dbias gives them."""
        if self.by_key:
            return pairs.sum(2)
        R, K = pairs.shape[2:]
        of_pair = torch.arange(K) - torch.arange(R)[:, None] + R - 1
        found = pairs.new_zeros(*pairs.shape[:2], R + K - 1)
        return found.index_add_(2, of_pair.flatten(), pairs.flatten(2))

    @property
    def _offsets(self) -> Tensor:
        q_len = self.table.shape[-1] - int(self.keys_K.max()) - BEYOND
        return q_len - 1 - self.rows_R


SMALL = StepConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)
UNIT = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
UNIT_FLOAT32 = 2**-24
# Below the smallest normal number the spacing is constant.
SMALLEST_STEP = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2**-24}


@dataclass(frozen=True)
class StepCase:
    """One step: its mask, its sizes, and whether something was accumulated before."""

    visible: Visible = ALL
    upper: str | None = None  # names of functions in VECTORS
    lower: str | None = None
    rows: int = 96
    keys: int = 64
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1
    head_dim: int = 16
    value_dim: int | None = None  # None: head_dim
    dtype: torch.dtype = torch.float32
    sequence_first: bool = False  # memory order [B, S, H, D] instead of [B, H, S, D]
    accumulate: bool = True
    final: bool = False
    scale: float = 0.3
    softcap: float = 0.0
    dropout_p: float = 0.0
    bias: str = ""  # a kind of StepBias; " of spans" for tokens in two spans
    config: StepConfig = SMALL

    @property
    def square(self) -> StepConfig:
        """The tiles of dbias."""
        block = min(self.config.block_m, self.config.block_n)
        return dataclasses.replace(self.config, block_m=block, block_n=block)

    def __str__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return " ".join(changed) or "all"


def low_cases(visible: Visible, **more: Any) -> list[StepCase]:
    """The same with operands of 16 bits, and other widths of keys and values."""
    sizes = {"rows": 70, "head_dim": 24, "value_dim": 40} | more
    return [StepCase(visible, dtype=x, **sizes) for x in UNIT if UNIT[x]]


def documents(row: int) -> int:
    """The first key of the document that the row is in: documents of 20 tokens."""
    return row // 20 * 20


VECTORS = {
    "next_document": lambda row: documents(row) + 20,
    "document": documents,
    "causal": lambda row: row + 1,
    "window": lambda row: row - 24,
    "ahead": lambda row: row + 2,
    "after": lambda row: row - 1,
    "stairs": lambda row: row // 7 * 5,
    "beyond_both_ends": lambda row: 3 * row - 70,
}


def vector(name: str | None, rows: int) -> Tensor | None:
    if name is None:
        return None
    return torch.tensor([VECTORS[name](i) for i in range(rows)], dtype=torch.int32)


def positions(count: int, start: int) -> Tensor:
    """Of tokens that a rank holds in two spans."""
    index = torch.arange(count)
    return start + index + 1000 * (index >= count // 2)


def dropout_of(case: StepCase) -> Dropout:
    seeds = torch.Generator().manual_seed(3)
    shape = case.batch, case.heads
    drawn = torch.randint(SEED_LIMIT, shape, generator=seeds)
    return Dropout(case.dropout_p, drawn, positions(case.rows, 70))


def dropout_factors(case: StepCase, earlier: int) -> Tensor:
    """[B, H, R, earlier + K], of keys at the start and of the two spans of the step."""
    half, rest = case.keys // 2, case.keys - case.keys // 2
    at = positions(case.keys, 40)
    spans = [(0, earlier), (40, half), (int(at[-1]) + 1 - rest, rest)]
    parts = (
        Block(0, case.rows, 0, n, position=first, masked=True) for first, n in spans
    )
    dropout = dropout_of(case)
    return torch.cat([dropout.factors(part, torch.float64) for part in parts], -1)


def bias_of(case: StepCase) -> StepBias | None:
    if not case.bias:
        return None
    at = positions(case.rows, 70), positions(case.keys, 40)
    if "of spans" not in case.bias and not case.dropout_p:
        at = 70 + torch.arange(case.rows), 40 + torch.arange(case.keys)
    return StepBias.of(case.bias, (case.batch, case.heads), *at)


def changes(case: StepCase) -> ScoreModifiers:
    bias, dropping = bias_of(case), None
    if case.dropout_p:
        dropout, keys = dropout_of(case), positions(case.keys, 40)
        vectors = (x.int() for x in (dropout.seeds_BH, dropout.rows_R, keys))
        dropping = DropoutConstants(dropout.drop_below, 1 - case.dropout_p, *vectors)
    return ScoreModifiers(
        case.softcap, dropping, None if bias is None else bias.biasing()
    )


def full_mask(case: StepCase) -> Tensor:
    limits = (vector(x, case.rows) for x in (case.upper, case.lower))
    return seen(case.visible, *limits, case.rows, case.keys, "cpu")


def operand(case: StepCase, heads: int, length: int, dim: int) -> Tensor:
    """Random numbers within a buffer of NaN: nothing beyond the ends may be used."""
    sizes = (case.batch, heads, length + 64, dim + 64)
    if case.sequence_first:
        buffer = torch.full((sizes[0], sizes[2], sizes[1], sizes[3]), math.nan)
        buffer = buffer.transpose(1, 2)
    else:
        buffer = torch.full(sizes, math.nan)
    x = buffer.to(case.dtype)[:, :, :length, :dim]
    return x.copy_(torch.randn(x.shape))


@dataclass
class Reference:
    """Results in float64, each with the error that it may have."""

    out_in: Tensor
    lse_in: Tensor
    lse: Tensor
    delta: Tensor
    values: dict[str, Tensor]
    limits: dict[str, Tensor]


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Of what is not masked; 0 where a row has nothing."""
    return scores.masked_fill(~mask, -1e300).softmax(-1) * mask


def reference(
    case: StepCase, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Reference:
    """One softmax over an earlier chunk of keys (if accumulated) and this one."""
    group = case.heads // case.kv_heads
    earlier = 8 if case.accumulate else 0
    D, E = k.shape[-1], v.shape[-1]
    q0, q1, k1, v1 = (x.double().requires_grad_() for x in (q, q, k, v))
    grad = grad.double()
    k0 = torch.randn(*k.shape[:2], earlier, D).double()
    v0 = torch.randn(*k.shape[:2], earlier, E).double()
    mask0 = torch.ones(case.rows, earlier, dtype=torch.bool)
    mask0[case.rows // 2] = False  # this row has seen no key so far
    mask0[case.rows // 3, 1:] = False

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    def scores_of(q: Tensor, k: Tensor) -> Tensor:
        return case.scale * q @ spread(k).mT

    def capped(scores: Tensor) -> Tensor:
        cap = case.softcap
        return cap * torch.tanh(scores / cap) if cap else scores

    def lse_of(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~mask, -math.inf).logsumexp(-1)

    scores0, scores1 = capped(scores_of(q0, k0)), capped(scores_of(q1, k1))
    factors = torch.ones((), dtype=torch.float64).expand(case.rows, earlier + case.keys)
    if case.dropout_p:
        factors = dropout_factors(case, earlier)
    mask = torch.cat([mask0, full_mask(case)], 1)
    scores = torch.cat([scores0, scores1], -1)
    bare, bias, added = scores, bias_of(case), torch.zeros(())
    if bias is not None:
        added = bias.added(torch.cat([torch.arange(earlier), bias.keys_K]))
        mask = mask & (added > -math.inf)
        mask0, added = mask[..., :earlier], added.nan_to_num(neginf=0.0)
        scores = scores + added
        scores0 = scores[..., :earlier]
    values = spread(torch.cat([v0, v1], 2))
    p = softmax(scores, mask)
    out = (p * factors) @ values
    dq, dk, dv = torch.autograd.grad(out, (q1, k1, v1), grad)

    with torch.no_grad():
        lse = lse_of(scores, mask)
        out_in = (softmax(scores0, mask0) * factors[..., :earlier]) @ spread(v0)
        delta = (grad * out).sum(-1)
        ds = p * (grad @ values.mT * factors - delta[..., None])
        # See Note [Rounding of a step]. What comes from the earlier keys is float32.
        u, fp32, step = UNIT[case.dtype], UNIT_FLOAT32, SMALLEST_STEP[case.dtype]
        rounded = u * (torch.arange(earlier + case.keys) >= earlier)
        terms = (earlier + case.keys + case.rows * group) * fp32
        size = scores_of(q0.abs(), torch.cat([k0, k1], 2).abs()).abs()
        size = size + lse.abs().nan_to_num(posinf=0.0)[..., None] + added.abs()
        p_error = ((D + 8) * size + 4 * case.softcap) * fp32
        p_limit = p * (rounded + p_error + terms) + step
        dp_error = (E + 8) * fp32 * (grad.abs() @ values.mT.abs()) * factors
        dp_error += (E + 8) * fp32 * delta.abs()[..., None]
        ds_limit = ds.abs() * (rounded + p_error + terms) + p * dp_error + step
        dbias, dbias_limit = ds[..., earlier:], ds_limit[..., earlier:]
        if case.softcap:
            t = bare / case.softcap
            t_error = 2 * t.abs() * p_error / case.softcap + 2 * fp32
            ds_limit = ds_limit * (1 - t**2) + ds.abs() * t_error
        p_limit = p_limit * factors
        p1_limit = p_limit[..., earlier:]
        ds1_limit = abs(case.scale) * ds_limit[..., earlier:]
        limits = {
            "out": p_limit @ values.abs(),
            "lse": p_error.amax(-1) + terms,
            "dq": ds1_limit @ spread(k1).abs(),
            "dk": (ds1_limit.mT @ q1.abs()).unflatten(1, (-1, group)).sum(2),
            "dv": (p1_limit.mT @ grad.abs()).unflatten(1, (-1, group)).sum(2),
        }
        found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        if bias is not None:
            found["dbias"] = bias.sums(dbias)
            limits["dbias"] = bias.sums(dbias_limit + case.rows * fp32 * dbias.abs())
    found = {name: x.detach() for name, x in found.items()}
    return Reference(
        out_in=out_in.float(),
        lse_in=lse_of(scores0, mask0).detach().float(),
        lse=lse.float(),
        delta=delta.float(),
        values=found,
        limits=limits,
    )
