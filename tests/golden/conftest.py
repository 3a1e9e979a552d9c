"""Fake process groups: this process is one rank of eight, and nothing is exchanged."""

from collections.abc import Iterator

import pytest
from torch._dynamo.utils import counters

from cpcompile import refusals
from tests.golden.capture import shared_groups
from tests.golden.meshes import mesh, mesh_2d  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def no_mistakes() -> Iterator[None]:
    """Attempts of the passes end with a result or a refusal.

    Mistakes are raised, too, but what raises may be caught by another attempt.
    """
    counters["cpcompile"][refusals.COUNTER] = 0
    yield
    assert counters["cpcompile"][refusals.COUNTER] == 0, "a mistake had a fallback"


@pytest.fixture(autouse=True, scope="module")
def groups_of_a_file() -> Iterator[None]:
    """The tests of a file that need the same group share it."""
    with shared_groups():
        yield
