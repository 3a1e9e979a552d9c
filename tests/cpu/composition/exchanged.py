"""Counts what a process sends, by torch.profiler."""

from __future__ import annotations

from collections import Counter

import torch

# What torch and our operators call to send messages.
SENDING = ("_c10d_functional::all", "_c10d_functional::reduce", "c10d::", "cp::ring_sh")


class Exchanged:
    """The messages and collectives that are sent inside of the block, by name."""

    def __init__(self, *prefixes: str) -> None:
        """Counts events whose names begin with one of these, or all that send."""
        self._prefixes = prefixes or SENDING

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        self._profile = torch.profiler.profile()
        self._profile.__enter__()
        return self.counts

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        names = (event.name for event in self._profile.events())
        self.counts.update(x for x in names if x.startswith(self._prefixes))
