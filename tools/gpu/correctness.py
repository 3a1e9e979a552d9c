"""Section a: every step template against float64, on the GPU.

An item is one kernel on one case; the kernels of a case get the same operands. With
`accumulate` the step continues from 40 earlier keys, of which some rows saw none. With
dropout these are the first of the sequence, and the keys of the step come later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.kernels import launch
from cpcompile.kernels.bias_gradient import dbias
from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import (
    NO_MODIFIERS,
    BiasConstants,
    DropoutConstants,
    RowLimits,
    ScoreModConstants,
    ScoreModifiers,
)
from cpcompile.kernels.score_functions import triton_functions
from cpcompile.ops.step.dropout import SEED_LIMIT, Dropout
from tools.bench.aot_score_mod import SCORE_MOD
from tools.gpu import reference
from tools.gpu.correctness_cases import MASKS, StepCase, cases
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import normal

EARLIER_KEYS = 40
FIRST_ROW, FIRST_KEY = 3000, 1000  # positions, of the rows and keys of a step
WIDE_STRIDE = 2**22  # elements between rows: 520 of them pass 2^31


@dataclass(frozen=True)
class CaseItem:
    """One kernel on one case."""

    case: StepCase
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.kernel.value}: {self.case}"

    def run(self, mode: Mode) -> list[Row]:
        ratios = error_ratios(self.case, self.kernel, mode)
        worst = max(ratios.values())
        return [
            {
                "case": str(self.case),
                "kernel": self.kernel.value,
                # JSON knows no infinity.
                "ratios": {
                    n: x if x < 1e9 else "not finite" for n, x in ratios.items()
                },
                "passed": worst <= reference.ALLOWED_RATIO,
            }
        ]


def plan(mode: Mode) -> list[CaseItem]:
    """List all kernels on all cases; DBIAS only where there is a bias."""
    return [
        CaseItem(case, kernel)
        for case in cases(mode)
        for kernel in Kernel
        if kernel is not Kernel.DBIAS or (case.bias and case.mask != "row slice")
    ]


def error_ratios(case: StepCase, kernel: Kernel, mode: Mode) -> dict[str, float]:
    """Return the ratio of every result of the kernel; see Note [Error of a step]."""
    torch.manual_seed(0)
    tf32 = case.dtype == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    R, K, D, E = case.rows, case.keys, case.dim, case.value_dim or case.dim
    q, k = _operand(case, case.heads, R, D, mode), _operand(case, None, K, D, mode)
    v, grad = _operand(case, None, K, E, mode), _operand(case, case.heads, R, E, mode)
    scale, mask = D**-0.5, MASKS[case.mask]
    row = torch.arange(R, device=mode.device)
    upper, lower = (
        None if limit is None else limit(row).int()
        for limit in (mask.upper, mask.lower)
    )
    visible = mask.visible(R, K)
    sees = reference.seen(visible, upper, lower, R, K, mode.device)
    earlier = EARLIER_KEYS if case.accumulate else 0
    k0, v0 = (_operand(case, None, earlier, x, mode) for x in (D, E))
    saw = torch.ones(R, earlier, dtype=torch.bool, device=mode.device)
    saw[R // 2 :: 3] = False  # these rows have seen no key so far
    whole = torch.cat([k0, k], 2), torch.cat([v0, v], 2), grad
    whole_mask = torch.cat([saw, sees], 1)
    changes, changed = _changes(case, earlier, mode)
    exact = reference.exact(q, *whole, whole_mask, scale, earlier, changed)
    rough = reference.rough(q, *whole, whole_mask, scale, changed, case.dtype)

    rest = (RowLimits(visible, upper, lower), scale, case.final)
    lse = exact["lse"].float()
    delta = (grad.double() * exact["out"]).sum(-1).float()
    operands = (grad, q, k, v, lse, delta)
    before: dict[str, Tensor | None] = dict.fromkeys(("dq", "dk", "dv"))
    if case.accumulate:
        before["dq"] = exact["dq_before"].float()
    for name in ("dk", "dv"):
        for found in (exact, rough):
            found[name] = found[name][:, :, earlier:]
        if case.accumulate:
            start = before[name] = _of_other_ranks(exact[name])
            exact[name], rough[name] = exact[name] + start, rough[name] + start
    if kernel is Kernel.FORWARD:
        state: tuple[Tensor | None, ...] = (None, None)
        if case.accumulate:
            of_earlier = changed.of_first(earlier)
            before_step = (q, k0, v0, None, saw, scale, 0, of_earlier)
            earlier_exact = reference.exact(*before_step)
            state = earlier_exact["out"].float(), earlier_exact["lse"].float()
        got = dict(
            zip(
                ("out", "lse"),
                launch.forward(q, k, v, *state, *rest, changes=changes),
                strict=True,
            )
        )
    elif kernel is Kernel.DBIAS:
        for found in (exact, rough):
            found["dbias"] = _sums(case, found["dadded"][..., earlier:].float())
        got = {"dbias": dbias(*operands, *rest[:-1], changes=changes)}
    else:
        names = ("dk", "dv") if kernel is Kernel.DKDV else ("dq",)
        sums = [x for x in map(before.get, names) if x is not None]
        parts = launch.gradients(kernel, *operands, sums, *rest, changes=changes)
        got = dict(zip(names, parts, strict=True))
    return {
        name: reference.lse_ratio(x, exact[name], case.dtype)
        if name == "lse"
        else reference.error_ratio(x, rough[name], exact[name], case.dtype)
        for name, x in got.items()
    }


def _changes(
    case: StepCase, earlier: int, mode: Mode
) -> tuple[ScoreModifiers, reference.Changed]:
    """Make changes for the kernels, and for the reference over earlier and new keys."""
    R, K, p = case.rows, case.keys, case.dropout_p
    rows = torch.arange(R, device=mode.device) + FIRST_ROW
    keys = torch.arange(K, device=mode.device) + FIRST_KEY
    biasing, added = _biasing(case, earlier, rows, keys, mode)
    scoring = None
    if case.score_mod:
        scoring, added = _scoring(case, earlier, rows, keys)
    sigmoid = case.score_mod
    if not case.dropout_p:
        if not case.softcap and biasing is None and scoring is None:
            return NO_MODIFIERS, reference.UNCHANGED
        changed = reference.Changed(case.softcap, None, added, sigmoid)
        return ScoreModifiers(case.softcap, None, biasing, scoring), changed
    seeds = torch.randint(SEED_LIMIT, (case.batch, case.heads), device=mode.device)
    dropout = Dropout(p, seeds, rows)
    spans = (0, earlier), (FIRST_KEY, K)
    factors = [
        dropout.factors(
            Block(0, R, 0, count, position=first, masked=True), torch.float32
        )
        for first, count in spans
    ]
    vectors = (x.to(torch.int32) for x in (seeds, rows, keys))
    dropping = DropoutConstants(dropout.drop_below, 1 - p, *vectors)
    changed = reference.Changed(case.softcap, torch.cat(factors, -1), added, sigmoid)
    return ScoreModifiers(case.softcap, dropping, biasing, scoring), changed


def _scoring(
    case: StepCase, earlier: int, rows: Tensor, keys: Tensor
) -> tuple[ScoreModConstants, Tensor]:
    """Make SCORE_MOD with slopes, and what it adds to the sigmoid of every score."""
    slopes = torch.linspace(-1e-3, 1e-3, 16, device=rows.device)
    every_key = torch.cat([torch.arange(earlier, device=rows.device), keys])
    added = slopes[: case.heads, None, None] * (every_key - rows[:, None])
    functions = triton_functions(SCORE_MOD)
    assert functions is not None, "a call of SCORE_MOD has no expression"
    batches = torch.arange(case.batch, device=rows.device)
    vectors = (x.int() for x in (rows, keys, batches))
    return ScoreModConstants(functions, slopes, *vectors), added.expand(
        case.batch, -1, -1, -1
    )


def _biasing(
    case: StepCase, earlier: int, rows: Tensor, keys: Tensor, mode: Mode
) -> tuple[BiasConstants | None, Tensor | None]:
    """Make a table, and what it adds to every pair; the earlier keys are the first."""
    if not case.bias:
        return None, None
    heads = case.batch, case.heads
    q_len, kv_len = FIRST_ROW + case.rows, FIRST_KEY + case.keys
    count = kv_len if case.bias == "key" else q_len + kv_len - 1
    table = normal((*heads, count), mode, torch.float32)
    row_shift = normal((*heads, case.rows), mode, torch.float32)
    offsets = torch.zeros_like(rows) if case.bias == "key" else q_len - 1 - rows
    every_key = torch.cat([torch.arange(earlier, device=mode.device), keys])
    added = table[..., offsets[:, None] + every_key] - row_shift[..., None]
    by_row = None if case.bias == "key" else offsets.int()
    return BiasConstants(table, keys.int(), by_row, row_shift), added


def _sums(case: StepCase, pairs_BHRK: Tensor) -> Tensor:
    """Sum the pairs with one key, or one distance, in float64."""
    pairs, (B, H, R, K) = pairs_BHRK.double(), pairs_BHRK.shape
    if case.bias == "key":
        return pairs.sum(2)
    row, key = (torch.arange(n, device=pairs.device) for n in (R, K))
    entry = (key - row[:, None] + R - 1).flatten()
    found = pairs.new_zeros(B, H, R + K - 1)
    return found.index_add_(2, entry, pairs.flatten(2))


def _of_other_ranks(x: Tensor) -> Tensor:
    """Make a gradient so far, of the size of x, so that an error of x still shows."""
    return torch.randn_like(x, dtype=torch.float32) * x.std().float().nan_to_num()


def _operand(
    case: StepCase, heads: int | None, length: int, dim: int, mode: Mode
) -> Tensor:
    """Make [B, heads or kv_heads, length, dim] in the memory order of the case."""
    dtype = reference.torch_dtype(case.dtype)
    B, H = case.batch, heads or case.kv_heads
    if case.order == "BSHD":
        return normal((B, length, H, dim), mode, dtype).transpose(1, 2)
    x = normal((B, H, length, dim), mode, dtype)
    if case.order == "wide" and heads:
        assert B == H == 1, "rows that far apart leave no room for other dims"
        buffer = torch.empty(length * WIDE_STRIDE, device=mode.device, dtype=dtype)
        strides = (buffer.numel(), buffer.numel(), WIDE_STRIDE, 1)
        x = buffer.as_strided(x.shape, strides).copy_(x)
    return x
