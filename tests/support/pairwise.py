"""Small sets of cases in which every two values of different axes meet."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.case_selection import runs_all

Pair = frozenset[tuple[str, Any]]

SAMPLE = 12  # cases of a full product that run besides the pairwise ones
SEED = "CPCOMPILE_TEST_SEED"


def selected_cases(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The pairwise cases; with --all also a sample of the rest.

    Another one on every day, or of CPCOMPILE_TEST_SEED, which pytest prints.
    """
    cases = pairwise(axes)
    if runs_all():
        drawn = random.Random(sample_seed())
        more = [{x: drawn.choice(axes[x]) for x in axes} for _ in range(SAMPLE)]
        cases += [x for i, x in enumerate(more) if x not in cases + more[:i]]
    return cases


def in_pairs(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by `selected_cases`; a key may name several, "rows, keys"."""
    names = [name for key in axes for name in key.split(", ")]
    cases = []
    for case in selected_cases(axes):
        values: list[Any] = []
        for key, value in case.items():
            values += value if ", " in key else [value]
        cases.append(tuple(values))
    return pytest.mark.parametrize(names, cases, ids=_text)


def _text(value: Any) -> str:
    return getattr(value, "__name__", str(value)).replace("torch.", "")


def sample_seed() -> int:
    """Of what `selected_cases` draws."""
    return int(os.environ.get(SEED) or datetime.now(UTC).strftime("%Y%m%d"))


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that cover every pair of values of two axes, by a greedy search.

    Each case starts with the first pair that is still missing; every other axis then
    takes the value that adds most of the missing pairs. The order is deterministic.
    """
    missing = dict.fromkeys(all_pairs(axes))  # a set that keeps its order
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in [x for x in axes if x not in case]:
            gains = [
                sum(frozenset({(name, value), x}) in missing for x in case.items())
                for value in axes[name]
            ]
            case[name] = axes[name][gains.index(max(gains))]
        cases.append({name: case[name] for name in axes})
        for pair in covered_pairs(cases[-1]):
            missing.pop(pair, None)
    return cases


def all_pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """{(axis, value), (other axis, value)} of every two."""
    for first, second in itertools.combinations(axes, 2):
        for one, other in itertools.product(axes[first], axes[second]):
            yield frozenset({(first, one), (second, other)})


def covered_pairs(case: Mapping[str, Any]) -> Iterator[Pair]:
    """The pairs of one complete case, in the form of `all_pairs`."""
    return map(frozenset, itertools.combinations(case.items(), 2))
