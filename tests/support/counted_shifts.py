"""The messages of rings in the code that Inductor makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from cpcompile import config
from cpcompile.compile import compile_local
from cpcompile.compile.overlap import check_overlap


@contextmanager
def counted_shifts(unroll: int) -> Iterator[list[int]]:
    """How many messages each code that Inductor makes has, each hidden."""
    found: list[int] = []

    def check(code: str) -> None:
        found.append(len(check_overlap(code)))

    with (
        config.patch(check_overlap=True, unroll=unroll),
        mock.patch.object(compile_local, "check_overlap", check),
    ):
        yield found
    left = torch._C._distributed_c10d._get_work_registry_size()
    assert left == 0, "messages that nobody has waited for"
