"""Which weights dropout drops: numbers, gradients, and whether they look random."""

import math

import pytest
import torch

from cpcompile.geometry.blocks import Block
from cpcompile.ops.step.dropout import SEED_LIMIT, Dropout
from tests.support.attention_calls import attention
from tests.support.bounds import assert_close

B, H, G, S, D, E = 2, 4, 2, 9, 8, 6


def factors(p, seeds, rows, keys):
    part = Block(0, rows, 0, keys)
    return Dropout(p, seeds, torch.arange(rows)).factors(part, torch.float64)


def test_numbers_and_gradients():
    """Against the same attention in float64, with the weights that are dropped."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((B, H, S, D), (B, G, S, D), (B, G, S, E))
    )
    seeds = torch.randint(SEED_LIMIT, (B, H))
    out, _ = attention("local")(q, k, v, 0.3, dropout_p=0.4, seeds=seeds)
    heads = [x.repeat_interleave(H // G, 1) for x in (k, v)]
    weights = (q @ heads[0].mT * 0.3).softmax(-1) * factors(0.4, seeds, S, S)
    exact = weights @ heads[1]
    grad = torch.randn_like(out)
    assert_close("out", out, exact)
    got, wanted = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, exact))
    for name, x, y in zip("qkv", got, wanted, strict=True):
        assert_close(f"gradient of {name}", x, y)


def test_a_part_has_what_the_whole_has():
    seeds = torch.randint(SEED_LIMIT, (B, H))
    whole = factors(0.3, seeds, 20, 30)
    rows = torch.tensor([3, 4, 17])  # a rank's, in any layout
    part = Block(1, 2, 0, 5, position=11)
    found = Dropout(0.3, seeds, rows).factors(part, torch.float64)
    assert torch.equal(found, whole[:, :, [4, 17], 11:16])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_it_drops_so_many(p):
    """Of all, of every row, and of every column: within five standard deviations."""
    torch.manual_seed(1)
    kept = factors(p, torch.randint(SEED_LIMIT, (4, 8)), 256, 256) > 0
    for dims in ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (2, 3)):
        shares = kept.double().mean(dims)
        count = kept.numel() / shares.numel()
        assert (shares - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("move", ["rows", "keys", "heads", "both"])
def test_neighbours_are_independent(move):
    torch.manual_seed(2)
    x = (factors(0.5, torch.randint(SEED_LIMIT, (2, 8)), 256, 256) > 0).double() - 0.5
    pairs = {
        "rows": x[:, :, 1:] * x[:, :, :-1],
        "keys": x[..., 1:] * x[..., :-1],
        "heads": x[:, 1:] * x[:, :-1],
        "both": x[:, :, 1:, :-1] * x[:, :, :-1, 1:],
    }
    found = pairs[move] * 4  # each 1 or -1
    assert abs(found.mean()) < 5 / math.sqrt(found.numel())


def test_seeds_that_are_close_have_other_masks():
    close = factors(0.5, torch.tensor([[7, 8]]), 64, 64) > 0
    share = (close[:, 0] == close[:, 1]).double().mean()
    assert abs(share - 0.5) < 5 * 0.5 / 64
