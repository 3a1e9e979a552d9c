"""The factorisation of the ranks that share a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CPDegrees:
    """A factorisation of the ranks: all-to-all over `ulysses`, then a ring of `ring`.

    inner: which of both groups consists of consecutive ranks, "ulysses" or "ring". The
    all-gather counts as a ring: it splits no heads.
    """

    ulysses: int
    ring: int
    inner: str = "ulysses"

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.ulysses * self.ring

    def __str__(self) -> str:
        if self.inner == "ring":
            return f"{self.ring} (ring) in {self.ulysses}"
        return f"{self.ulysses} in {self.ring} (ring)"
