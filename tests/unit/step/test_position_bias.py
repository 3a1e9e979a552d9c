"""A part of a bias of positions or of dropout is that of all pairs."""

import importlib
import math

import pytest
import torch

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.ops.step import row_mask, rows_under_mask
from cpcompile.ops.step.dropout import SEED_LIMIT, Dropout
from cpcompile.ops.step.position_bias import (
    PositionBias,
    add_bias_gradient,
    own_bias,
    zero_bias_gradient,
)
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import filled_number
from tests.support.attention_calls import attention, rest_of_local
from tests.support.bounds import assert_close
from tests.support.largest_value import Largest
from tests.support.position_biases import of_pairs

QUERIES, KEYS = 13, 17
ROWS = (TokenSpan(2, 0, 4), TokenSpan(9, 4, 3))  # rows 2 to 5 and 9 to 11, as in zigzag
PARTS = [
    (Block(0, 4, 0, KEYS, masked=True), 2),
    (Block(1, 2, 5, 3, position=5), 3),
    (Block(4, 3, 0, 6, position=7, masked=True), 9),
    (Block(5, 1, 2, 1, position=16, masked=True), 10),
]


def table(numbers: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numbers)
    size = (*shape, numbers)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def summing_error(x: torch.Tensor) -> float:
    """Of two sums of some elements of x, in two orders: half a unit for each term."""
    return float(torch.finfo(x.dtype).eps * x.abs().sum() * x.numel())


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("numbers", [KEYS, QUERIES + KEYS - 1])
@pytest.mark.parametrize(("part", "row"), PARTS)
def test_parts_and_gradients(numbers, shape, part, row):
    bias = table(numbers, shape).requires_grad_()
    given = own_bias(bias.detach(), ROWS, (QUERIES, KEYS))
    assert isinstance(given, PositionBias)
    pairs = of_pairs(bias, QUERIES, KEYS).expand(*shape, QUERIES, KEYS)
    keys = slice(part.position, part.position + part.keys)
    expected = pairs[:, :, row : row + part.rows, keys]
    assert torch.equal(given.of_block(part), expected)

    ds = torch.randn(2, 3, part.rows, part.keys, dtype=torch.float64)
    (grad,) = torch.autograd.grad(expected.expand(2, 3, -1, -1), bias, ds)
    total = zero_bias_gradient(ds, given, True)
    add_bias_gradient(total, given, part, ds)
    assert (total - grad).abs().max() <= summing_error(ds)


LOW = [0.0, -torch.inf, -1e9, -1e4, torch.finfo(torch.float64).min]


def outcome(bias: torch.Tensor, queries: int, keys: int) -> list[torch.Tensor]:
    """out, and the gradients of q, k, v and, in the end, the bias."""
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    generator = torch.Generator().manual_seed(5)
    leaves = [
        torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_()
        for x in shapes
    ]
    out, _ = attention("local")(*leaves, 0.3, bias=bias)
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [*leaves, bias])]


@pytest.mark.parametrize("elements", [100, 1 << 24])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("numbers", [KEYS, QUERIES + KEYS - 1])
def test_rows_of_low_numbers_are_as_those_of_pairs(monkeypatch, numbers, low, elements):
    """Also where a row has nothing else: Note [Rows of low numbers]."""
    for module in (rows_under_mask, row_mask):
        monkeypatch.setattr(module, "MASK_ELEMENTS", elements)
    bias = table(numbers, (2, 4))
    bias[:, :2] = bias[:, :2].masked_fill(torch.arange(numbers) >= 4, low)
    bias.requires_grad_()
    *got, grad = outcome(bias, QUERIES, KEYS)
    pairs = of_pairs(bias, QUERIES, KEYS).expand(-1, -1, QUERIES, -1).contiguous()
    *expected, of_all = outcome(pairs, QUERIES, KEYS)
    (summed,) = torch.autograd.grad(pairs, bias, of_all)
    for x, wanted in zip(got, expected, strict=True):
        assert torch.equal(x, wanted)
    assert (grad - summed).abs().max() <= summing_error(of_all)


@pytest.mark.parametrize("low", [0.0, -1e9])
def test_nothing_is_held_for_all_pairs(monkeypatch, low):
    tokens, elements = 512, 4096
    for module in (rows_under_mask, row_mask):
        monkeypatch.setattr(module, "MASK_ELEMENTS", elements)
    q = torch.randn(1, 2, tokens, 4)
    bias = torch.randn(1, 2, 2 * tokens - 1)
    bias[..., :7] = low
    module = importlib.import_module("cpcompile.ops.strategies.ulysses_attention")
    forward = module.local_attention._init_fn
    backward = module.local_attention_backward._init_fn
    with Largest() as largest:
        given = rest_of_local(0.5, bias=bias)
        out, lse = forward(q, q, q, *given)
        *_, grad = backward(q, q, q, q, out, lse, *given, True, None)
    assert grad.shape == bias.shape
    # Diagonals are summed in rows that are padded by as many entries.
    assert q.numel() < largest.numel <= 2 * elements < 2 * tokens**2 / 32


def test_gradients_are_added_in_the_accumulation_dtype():
    bias = table(KEYS, (1, 1)).bfloat16()
    given = own_bias(bias, ROWS, (QUERIES, KEYS))
    total = zero_bias_gradient(bias, given, True)
    assert total.dtype == torch.float32 and not total.any()
    assert zero_bias_gradient(bias, given, False).numel() == 0


def test_kernels_count_filled_and_added_numbers_alike():
    """Of a row that sees no others, as RowMask does; -inf stays hidden."""
    filled, lowest = filled_number(torch.float32), torch.finfo(torch.float32).min
    numbers = torch.tensor([filled, lowest, -torch.inf])
    table = PositionBias(numbers.view(1, 1, 3), (TokenSpan(0, 0, 2),), 2, 3)
    for highest in (filled, lowest):
        row_shift = torch.full((1, 1, 2, 1), highest)
        changes = RowModifiers(bias=table, row_shift=row_shift)
        given = changes.at_keys(torch.zeros(1, 1, 2, 8), slice(None), torch.arange(3))
        assert given.biasing is not None
        left = (
            given.biasing.table_BHN[:, :, None] - given.biasing.row_shift_BHR[..., None]
        )
        assert left.tolist() == [[[[0, 0, -torch.inf]] * 2]]


B, H, G, TOKENS, D, E = 2, 4, 2, 9, 8, 6


def factors(p, seeds, rows, keys):
    part = Block(0, rows, 0, keys)
    return Dropout(p, seeds, torch.arange(rows)).factors(part, torch.float64)


def test_numbers_and_gradients():
    """Against the same attention in float64, with the weights that are dropped."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((B, H, TOKENS, D), (B, G, TOKENS, D), (B, G, TOKENS, E))
    )
    seeds = torch.randint(SEED_LIMIT, (B, H))
    out, _ = attention("local")(q, k, v, 0.3, dropout_p=0.4, seeds=seeds)
    heads = [x.repeat_interleave(H // G, 1) for x in (k, v)]
    weights = (q @ heads[0].mT * 0.3).softmax(-1) * factors(0.4, seeds, TOKENS, TOKENS)
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
    close = factors(0.5, torch.tensor([[7, 8]]), 64, 64) > 0
    share = (close[:, 0] == close[:, 1]).double().mean()
    assert abs(share - 0.5) < 5 * 0.5 / 64


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
