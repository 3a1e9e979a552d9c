"""Which gradients a wrapper expects, by the ranks that it reduces over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpcompile.errors import InputError
from cpcompile.frontend.reducers import Reducer, settled
from cpcompile.options import GradSync


def mesh(*ranks: int) -> SimpleNamespace:
    return SimpleNamespace(mesh=torch.tensor(ranks))


def reducer(*ranks: int, mean: bool = True) -> Reducer:
    return Reducer("FSDP2", frozenset(ranks), mean)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (None, GradSync.REDUCE),
        (reducer(0, 1, 2, 3), GradSync.AVERAGE),
        (reducer(0, 1), GradSync.AVERAGE),
        (reducer(0, 1, 2, 3, mean=False), GradSync.NONE),
        (reducer(0, 2), GradSync.REDUCE),
        (reducer(0), GradSync.REDUCE),
    ],
)
def test_what_a_wrapper_expects(by, expected) -> None:
    """Without one, names count."""
    assert settled(None, by, mesh(0, 1)) is expected
    assert settled(expected, by, mesh(0, 1)) is expected
    for asked in GradSync:
        assert settled(asked, None, mesh(0, 1)) is asked


@pytest.mark.parametrize("asked", [None, *GradSync])
def test_a_wrapper_over_a_part_of_the_axis(asked) -> None:
    with pytest.raises(InputError) as raised:
        settled(asked, reducer(0, 1), mesh(0, 1, 2, 3))
    assert str(raised.value) == (
        "parameters are managed by FSDP2, which averages over the ranks [0, 1], and "
        "the sequence is sharded over the ranks [0, 1, 2, 3]; needed all of these "
        'among the former, or only one: wrap over mesh["dp"], or over both axes: '
        'mesh["dp", "cp"]._flatten("dp_cp")'
    )


@pytest.mark.parametrize(
    ("asked", "by", "needed"),
    [
        ("none", reducer(0, 1), "average"),
        ("average", reducer(0, 1, mean=False), "none"),
        ("reduce", reducer(0, 1, mean=False), "none"),
        ("average", reducer(0, 2), "reduce"),
        ("none", reducer(0), "reduce"),
    ],
)
def test_names_that_contradict(asked, by, needed) -> None:
    with pytest.raises(InputError, match=f"{asked!r}.*needed {needed!r}"):
        settled(GradSync(asked), by, mesh(0, 1))
