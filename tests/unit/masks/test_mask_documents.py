"""Positions are compared as tokens where documents count their steps, only there."""

from __future__ import annotations

import pytest
import torch

from tests.unit.masks.mask_cases import attend, check, operands, read

S = 21


def steps(positions):
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)


def model(documents_of, positions_of=lambda p, o: p):
    """A window of three positions, within documents."""

    def mask_of(q, k, positions, others):
        documents = documents_of(positions, others)
        at = positions_of(positions, others)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        i, j = at[:, None, :, None], at[:, None, None, :]
        return same & (j <= i) & (j > i - 3)

    return attend(mask_of)


NEAR = {
    "steps of 2": model(lambda p, o: (steps(p) != 2).cumsum(-1)),
    "steps down": model(lambda p, o: (steps(p) != -1).cumsum(-1)),
    "equal steps": model(lambda p, o: (steps(p) == 1).cumsum(-1)),
    "larger steps": model(lambda p, o: (steps(p) > 1).cumsum(-1)),
    "a counter of 8 bits": model(
        lambda p, o: (steps(p) != 1).cumsum(-1, dtype=torch.int8).long()
    ),
    "steps of others": model(lambda p, o: (steps(o) != 1).cumsum(-1)),
    "positions of others": model(
        lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: o
    ),
    "doubled positions": model(
        lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: 2 * p
    ),
    "steps of two": model(
        lambda p, o: (
            torch.cat([p[:, :2], p], 1)[:, 2:] - torch.cat([p[:, :2], p], 1)[:, :-2]
            != 1
        ).cumsum(-1)
    ),
    "steps in the batch": model(
        lambda p, o: (torch.diff(p, prepend=p[:1] - 1, dim=0) != 1).cumsum(0)
    ),
    "other batch": model(lambda p, o: (steps(p) != 1).cumsum(-1).flip(0)),
}
EXACT = {
    "as it is": model(lambda p, o: (steps(p) != 1).cumsum(-1)),
    "moved": model(lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: p + 7),
}


def data(seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.tensor([1, 1, 1, 2, 2, -1, 0, -5])
    walks = steps[torch.randint(0, len(steps), (2, 2, S), generator=g)].cumsum(-1)
    return tuple(walks)


@pytest.mark.parametrize("name", [*NEAR, *EXACT])
def test_what_looks_alike_is_not_taken_for_it(name):
    q, k = operands(S)
    found = read((NEAR | EXACT)[name], q, k, *data(0))
    if name in EXACT:
        assert found.text == "causal, window 3, same document"
    else:
        assert found.masks[0] is not None and found.masks[0].bias is not None
    for seed in range(12):
        check(found, q, k, *data(seed))
