"""Section a: every step template against float64, on the GPU.

An item is one kernel on one case; the kernels of a case get the same operands. With
`accumulate` the step continues from 40 earlier keys, of which some rows saw none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.kernels import launch
from cpcompile.kernels.configs import Kernel
from tools.gpu import reference
from tools.gpu.sections import Mode, Row
from tools.gpu.timing import normal

EARLIER_KEYS = 40
DOCUMENT = 100  # tokens
DTYPES = ("bfloat16", "float16")
SMOKE_MASKS = ("causal", "fold", "row slice", "document vectors")
SMOKE_SIZES = {"rows": 56, "keys": 40, "dim": 24, "heads": 2, "kv_heads": 1}
WIDE_STRIDE = 2**22  # elements between rows: 520 of them pass 2^31

Vector = Callable[[Tensor], Tensor]  # limits of rows


@dataclass(frozen=True)
class Mask:
    """What rows see of a chunk, for given sizes."""

    visible: Callable[[int, int], Visible] = lambda rows, keys: ALL
    upper: Vector | None = None
    lower: Vector | None = None


def _line(upper: int, lower: int | None = None) -> Visible:
    return Visible(
        upper=(upper, upper), lower=None if lower is None else (lower, lower)
    )


MASKS = {
    "all": Mask(),
    "none": Mask(lambda rows, keys: NOTHING),
    "out of reach": Mask(lambda rows, keys: _line(-rows)),
    "causal": Mask(lambda rows, keys: _line(1)),
    "offset": Mask(lambda rows, keys: _line(keys // 3)),
    "negative offset": Mask(lambda rows, keys: _line(-rows // 4)),
    "parity": Mask(lambda rows, keys: Visible(upper=(1, 0))),
    "fold": Mask(lambda rows, keys: Visible(upper=(keys // 4, -7))),
    "row slice": Mask(lambda rows, keys: Visible(rows=(rows // 2, rows))),
    "inner rows": Mask(
        lambda rows, keys: Visible(rows=(rows // 3, rows - 5), upper=(9, 9))
    ),
    "key slice": Mask(lambda rows, keys: Visible(keys=(0, keys // 2))),
    "inner keys": Mask(
        lambda rows, keys: Visible(keys=(keys // 5, keys - 3), upper=(9, 9))
    ),
    "window": Mask(lambda rows, keys: _line(1, -100)),
    "upper vector": Mask(upper=lambda row: row // 7 * 5),
    "lower vector": Mask(lower=lambda row: row // DOCUMENT * DOCUMENT),
    "document vectors": Mask(
        upper=lambda row: row + 1, lower=lambda row: row // DOCUMENT * DOCUMENT
    ),
}


@dataclass(frozen=True)
class StepCase:
    """One step: sizes, dtype, layout in memory, mask, and what went before."""

    mask: str = "causal"
    dtype: str = "bfloat16"
    rows: int = 512
    keys: int = 640
    dim: int = 128
    value_dim: int | None = None  # None: dim
    heads: int = 4
    kv_heads: int = 2
    batch: int = 1
    order: str = "BHSD"  # of dims in memory; "wide" is rows 2^22 elements apart
    accumulate: bool = True
    final: bool = False

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default and f.name not in ("mask", "dtype")
        ]
        return " ".join((self.mask, self.dtype, *changed))


def cases(mode: Mode) -> list[StepCase]:
    """Those that compile longest first: they decide when the section ends."""
    if mode.smoke:
        sizes = [StepCase(mask, **SMOKE_SIZES) for mask in SMOKE_MASKS]
        return [
            *sizes,
            dataclasses.replace(sizes[0], dtype="float16", order="BSHD", final=True),
            StepCase("none", **SMOKE_SIZES, accumulate=False),
        ]
    if mode.quick:
        return [*(StepCase(mask) for mask in ("causal", "row slice", "key slice"))]
    return list(dict.fromkeys(_all_cases()))


def _all_cases() -> Iterator[StepCase]:
    for dim in (256, 128, 96, 80, 64):
        yield StepCase("causal", "float32", dim=dim, rows=300, keys=260)
    for mask in ("window", "parity", "document vectors"):
        yield StepCase(mask, "float32", dim=64)
    for dim in (64, 128):
        yield StepCase("causal", "tf32", dim=dim)
    for dim in (256, 96, 80, 64):
        for dtype in DTYPES:
            yield StepCase("causal", dtype, dim=dim, final=True)
    for mask in MASKS:
        yield StepCase(mask, "bfloat16")
        # float16 is eight times finer, so that it shows more of a wrong mask.
        yield StepCase(mask, "float16", rows=500, keys=389, order="BSHD")
    for mask in ("all", "causal", "none"):
        yield StepCase(mask, accumulate=False)
        yield StepCase(mask, accumulate=False, final=True)
    for heads, kv_heads in ((8, 2), (6, 1), (3, 3)):
        yield StepCase("causal", heads=heads, kv_heads=kv_heads, batch=2, order="BSHD")
    for rows, keys in ((1, 1), (129, 65), (1000, 777), (777, 1000)):
        yield StepCase("causal", "float16", rows=rows, keys=keys, final=True)
    yield StepCase("causal", dim=64, value_dim=128, heads=2)
    yield StepCase("causal", dim=192, value_dim=128, heads=2)
    for mask in ("all", "causal"):
        yield StepCase(mask, rows=4096, keys=4096, heads=2)
    yield StepCase("causal", rows=520, heads=1, kv_heads=1, order="wide")


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
    """All kernels on all cases."""
    return [CaseItem(case, kernel) for case in cases(mode) for kernel in Kernel]


def error_ratios(case: StepCase, kernel: Kernel, mode: Mode) -> dict[str, float]:
    """Of every result of the kernel; see Note [Error of a step]."""
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
    exact = reference.exact(q, *whole, whole_mask, scale, earlier)
    rough = reference.rough(q, *whole, whole_mask, scale)

    rest = (upper, lower, visible, scale, case.final)
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
            earlier_exact = reference.exact(q, k0, v0, None, saw, scale)
            state = earlier_exact["out"].float(), earlier_exact["lse"].float()
        got = dict(
            zip(("out", "lse"), launch.forward(q, k, v, *state, *rest), strict=True)
        )
    elif kernel is Kernel.DKDV:
        parts = launch.dkdv(*operands, before["dk"], before["dv"], *rest)
        got = dict(zip(("dk", "dv"), parts, strict=True))
    else:
        got = {"dq": launch.dq(*operands, before["dq"], *rest)}
    return {
        name: reference.lse_ratio(x, exact[name], case.dtype)
        if name == "lse"
        else reference.error_ratio(x, rough[name], exact[name], case.dtype)
        for name, x in got.items()
    }


def _of_other_ranks(x: Tensor) -> Tensor:
    """A gradient so far, of the size of x, so that an error of x still shows."""
    return torch.randn_like(x, dtype=torch.float32) * x.std().float().nan_to_num()


def _operand(
    case: StepCase, heads: int | None, length: int, dim: int, mode: Mode
) -> Tensor:
    """[B, heads or kv_heads, length, dim] in the memory order of the case."""
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
