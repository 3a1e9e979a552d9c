"""Programs at random: comparisons, connectives, writes in place, ways to hide."""

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.passes.model.masks.analysis.decompositions import _padded
from tests.unit.masks.mask_builders import LOWEST, packed
from tests.unit.masks.mask_cases import attend, check, operands, read

Inputs = dict[str, Any]
Program = Callable[[Inputs], Tensor]


def comparison(rng: random.Random) -> Program:
    """An atom."""
    c, m = rng.randint(-4, 9), rng.randint(2, 7)
    sign = rng.choice([operator.lt, operator.le, operator.gt, operator.ge])
    any_sign = rng.choice([sign, operator.eq, operator.ne])
    return rng.choice(
        [
            lambda e: sign(e["j"], e["i"] + c),
            lambda e: sign(e["i"] - e["j"], c),
            lambda e: sign((e["i"] - e["j"]).abs(), c),
            lambda e: any_sign((e["j"] + c) // m, e["i"] // m),
            lambda e: any_sign(e["dq"], e["dk"]),
            lambda e: e["dq"] == e["dk"],
            lambda e: e["keys"][:, None, None, :],
            lambda e: e["rows"][:, None, :, None],
            lambda e: any_sign(e["j"], e["n"][:, None, None, None] + c),
            lambda e: any_sign((e["i"] * m) % 7, (e["j"] * m) % 7),
            lambda e: any_sign(e["i"] % 3, 1),
            lambda e: any_sign(e["j"] % 5, c),
            lambda e: sign(e["pk"], e["pq"] + c),
            lambda e: (e["dq"] == e["dk"]) & sign(e["pk"], e["pq"] + c),
            lambda e: torch.full_like(e["i"], c > 0, dtype=torch.bool),
        ]
    )


def formula(rng: random.Random, depth: int) -> Program:
    if depth == 0 or rng.random() < 0.2:
        return comparison(rng)
    kind = rng.choice(["and"] * 6 + ["or", "or", "not", "xor", "equal", "where"])
    a, b, c = (formula(rng, depth - 1) for _ in range(3))
    return {
        "and": lambda e: a(e) & b(e),
        "or": lambda e: torch.logical_or(a(e), b(e)),
        "not": lambda e: ~a(e),
        "xor": lambda e: a(e) ^ b(e),
        "equal": lambda e: a(e) == b(e),
        "where": lambda e: torch.where(a(e), b(e), c(e)),
    }[kind]


def hidden(rng: random.Random, visible: Program) -> Program:
    """The mask that says which pairs are visible, in one of many ways."""
    cut = rng.randint(0, 5)

    def whole(e: Inputs) -> Tensor:
        return visible(e).expand(*e["sizes"])

    def filled(e: Inputs) -> Tensor:
        mask = torch.zeros(e["sizes"])
        mask.masked_fill_(~whole(e), -torch.inf)
        return mask

    def through_views(e: Inputs) -> Tensor:
        mask = whole(e).clone()
        part = mask[:, :, :, :cut]
        part.logical_not_()
        mask[:, :, cut:] &= e["j"] <= e["i"][cut:]
        return mask

    def part_of_larger(e: Inputs) -> Tensor:
        _, _, queries, keys = e["sizes"]
        mask = torch.ones(queries + 2, keys + 3, dtype=torch.bool).tril(cut)
        mask = mask[None, None].expand(e["sizes"][0], 1, -1, -1).clone()
        mask[:, :, :queries, 1 : keys + 1] = visible(e)
        mask[:, :, 2] = True
        mask[..., cut] = False
        return mask[:, :, :queries, 1 : keys + 1]

    def turned(e: Inputs) -> Tensor:
        return whole(e).transpose(-1, -2).contiguous().flip(-1).mT.flip(-2)

    return rng.choice(
        [
            visible,
            lambda e: torch.where(visible(e), 0.0, -torch.inf),
            lambda e: torch.where(visible(e), 0.0, LOWEST),
            lambda e: (1.0 - visible(e).float()) * LOWEST,
            lambda e: (visible(e).int() - 1) * 1e31,
            filled,
            through_views,
            part_of_larger,
            turned,
        ]
    )


def inputs(rng: random.Random, batch: int, queries: int, keys: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(rng.randint(0, 10**9))

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    longest = max(queries, keys)
    positions = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < longest:
            start = int(integers(0, 3, 1))
            row += range(start, start + int(integers(1, 8, 1)))
        positions.append(row[:longest])
    return [
        integers(-2, 3, batch, longest),
        integers(0, 5, batch, keys) > 0,
        integers(0, 5, batch, queries) > 0,
        integers(-3, keys + 4, batch),
        torch.tensor(positions),
    ]


@pytest.mark.parametrize("seed", range(48))
def test_random_programs(seed):
    rng = random.Random(seed)
    batch, queries = rng.choice([1, 2, 3]), rng.choice([13, 17])
    keys = queries if rng.random() < 0.7 else rng.choice([11, 20])
    mask = hidden(rng, formula(rng, rng.randint(0, 3)))
    by_positions = rng.random() < 0.6

    def mask_of(q, k, numbers, key, row, n, positions):
        documents = packed(positions) if by_positions else numbers
        return mask(
            {
                "sizes": (batch, 1, queries, keys),
                "i": torch.arange(queries)[:, None],
                "j": torch.arange(keys)[None],
                "dq": documents[:, None, :queries, None],
                "dk": documents[:, None, None, :keys],
                "pq": positions[:, None, :queries, None],
                "pk": positions[:, None, None, :keys],
                "keys": key,
                "rows": row,
                "n": n,
            }
        )

    q, k = operands(queries, keys, batch)
    data = [inputs(rng, batch, queries, keys) for _ in range(4)]
    found = read(attend(mask_of), q, k, *data[0], strict=rng.random() < 0.5)
    for each in data:
        check(found, q, k, *each)


PADS = [
    *((0, 0), (2, 1), (-1, 2), (2, -3), (-1, -2), (-6, 0), (-7, 2)),
    *((1, 0, 0, 2), (0, 0, -1, -1), (0, 0, 0, 0, 1, 1)),
]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_a_pad_is_that_of_torch(pad, value):
    for x, by in ((torch.randn(3, 5, 7), pad), (torch.zeros(2, 0), (1, 2))):
        assert torch.equal(_padded(x, by, value), F.pad(x, by, value=value))
