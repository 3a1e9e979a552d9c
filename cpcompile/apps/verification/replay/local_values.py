"""Compare what this rank holds of a value with the same part of the exact one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.apps.verification.bounds import Deviation, bound, error_of
from cpcompile.geometry.layout import TokenLayout
from cpcompile.passes.placement.laid_out import place_tokens


@dataclass(frozen=True)
class LocalValue:
    """A value of a sharded program, on this rank.

    axis: of the mesh, which shards the sequence. layout: the token layout, if the
        tokens are not in their natural order.
    """

    value: Tensor
    axis: int
    layout: TokenLayout | None

    def deviation(
        self, name: str, exact: Tensor, rough: Tensor | None, floor: float
    ) -> Deviation | None:
        """Return the deviation of this rank's part; None if shapes show another value.

        All ranks have to call this together, as partial sums are added.
        """
        if self.value.shape != exact.shape:
            return None
        got, part = self._both(exact)
        got, part = _real(got), _real(part)
        if not exact.is_floating_point() and not exact.is_complex():
            limit = 0.0
        else:
            limit = _bound(_real(exact), rough, floor)
        undefined = part.isnan() & got.isnan()
        error = error_of(
            got.masked_fill(undefined, 0.0), part.masked_fill(undefined, 0.0)
        )
        return Deviation(name, error, limit)

    def _both(self, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local part, and the same part of the exact value."""
        x = self.value
        if not isinstance(x, DTensor):
            return x, exact
        placements: tuple[Placement, ...] = tuple(
            Replicate() if p.is_partial() else p for p in x.placements
        )
        x = x.redistribute(placements=placements)
        mesh = x.device_mesh
        full = DTensor.from_local(
            exact, mesh, (Replicate(),) * mesh.ndim, run_check=False
        )
        if self.layout is not None and not placements[self.axis].is_replicate():
            part = place_tokens(full, placements, self.axis, self.layout)
        else:
            part = full.redistribute(placements=placements)
        return x.to_local(), part.to_local()


def _bound(exact: Tensor, rough: Tensor | None, floor: float) -> float:
    defined = torch.where(exact.isnan(), 0.0, exact)
    if rough is not None:
        rough = torch.where(exact.isnan(), 0.0, _real(rough))
    return bound(defined, rough, floor)


def _real(x: Any) -> Tensor:
    real: Tensor = torch.view_as_real(x) if x.is_complex() else x
    return real
