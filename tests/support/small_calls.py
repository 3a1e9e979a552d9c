"""One call after another on ranks, each compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.cpu.attention_cases import sequence_mesh

TIMES_ROUNDING = 1e-10  # of float64, with sums in another order
SINGLE = 1e-5  # of smaller dtypes


@dataclass(frozen=True)
class SmallCall:
    """call(x), where x is cut along `dim`; in float64 unless `dtype` says otherwise.

    changed: numbers that are written into x at flat positions beforehand.
    without_gradients: whether it is called without them, too, beforehand.
    """

    call: Callable[[Tensor], Any]
    shape: tuple[int, ...] = (2, 7, 3)
    dim: int = 1
    dtype: torch.dtype = torch.float64
    changed: Mapping[int, float] = field(default_factory=dict)
    without_gradients: bool = False

    def make_input(self) -> Tensor:
        """Return the same x in every process; it requires a gradient if it can."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        for place, number in self.changed.items():
            x.view(-1)[place] = number
        x = x.to(self.dtype)
        return x.requires_grad_(x.is_floating_point() or x.is_complex())


def check_calls(
    cases: Mapping[str, SmallCall], world: int, inner: str = "aot_eager"
) -> None:
    """Assert that all calls are as in one process, on this rank."""
    found = failures(cases, world, inner)
    assert not found, "\n".join(found)


def failures(
    cases: Mapping[str, SmallCall], world: int, inner: str = "aot_eager", **options: Any
) -> list[str]:
    """Say which of the calls differ from one process, or raise, on this rank."""
    options = {"mesh": sequence_mesh(world), "inner": inner, **options}
    return [
        f"{name}: {problem}"
        for name, case in cases.items()
        if (problem := _problem(case, options)) is not None
    ]


def _problem(case: SmallCall, options: dict[str, Any]) -> str | None:
    try:
        wanted = _results(case, None)
        got = _results(case, options)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if len(wanted) != len(got):
        return f"{len(got)} results, not {len(wanted)}"
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"value {number} is {other.dtype} {list(other.shape)}"
        precise = one.dtype in (torch.float64, torch.complex128)
        limit = TIMES_ROUNDING if precise else SINGLE
        wide = torch.complex128 if one.is_complex() else torch.float64
        a, b = one.to(wide), other.to(wide)
        scale = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=limit * max(scale, 1), equal_nan=True):
            return f"value {number} is {other.tolist()}, not {one.tolist()}"
    return None


def _results(case: SmallCall, options: dict[str, Any] | None) -> list[Tensor]:
    """Return results and the gradient of x; one process runs torch's aot_eager."""
    torch._dynamo.reset()
    x = case.make_input()

    def forward(x: Tensor) -> Any:
        return case.call(x * 1 if x.is_floating_point() or x.is_complex() else x + 0)

    if options is None:
        compiled = torch.compile(forward, backend="aot_eager")
    else:
        options = options | {"shard": {"x": case.dim}}
        compiled = torch.compile(forward, backend="cp", options=options)
    torch.manual_seed(5)
    with torch.no_grad():
        before = pytree.tree_leaves(compiled(x) if case.without_gradients else ())
    results = [y for y in pytree.tree_leaves(compiled(x)) if isinstance(y, Tensor)]
    found = [
        y.detach().resolve_conj().resolve_neg().clone() for y in [*before, *results]
    ]
    loss: Any = 0.0
    for number, y in enumerate(results):
        if y.requires_grad:
            weights = torch.linspace(0.5, 2 + number, y.numel(), dtype=torch.float64)
            weighted = y.to(torch.promote_types(y.dtype, torch.float32))
            weighted = weighted * weights.reshape(y.shape)
            # Outside of what is compiled: what it reads of a result counts as well.
            loss = (
                loss
                + (torch.view_as_real(weighted) if y.is_complex() else weighted).sum()
            )
    if isinstance(loss, Tensor):
        loss.backward()
    return found if x.grad is None else [*found, x.grad]
