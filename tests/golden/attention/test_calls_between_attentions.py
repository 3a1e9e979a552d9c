"""Which calls commute with a layout, and which see tokens in order."""

import pytest
import torch
import torch.nn.functional as F

from tests.golden.laid_out import attend, laid_out, moves


def conv(x):
    return F.conv1d(x.transpose(1, 2), torch.ones(8, 1, 3), padding=1, groups=8).mT


# What is exchanged for channels is brought back to the order of tokens, and laid out.
MIXING = {
    "conv": (conv, 2),  # each rank borrows the tokens beside its own
    "roll": (lambda x: x.roll(1, 1), 0),  # zigzag to zigzag, of few tokens
    "cumsum": (lambda x: x.cumsum(1), 2),
    "flip": (lambda x: x.flip(1), 0),
    "halves": (lambda x: torch.cat([x[:, 16:], x[:, :16]], 1), 2),
    "softmax over tokens": (lambda x: x.softmax(1), 2),
    "mean over tokens": (lambda x: x - x.mean(1, keepdim=True), 0),
    "scores": (lambda x: (x @ x.mT) @ x, 2),
    "attention by hand": (lambda x: (x @ x.mT).softmax(-1) @ x, 0),
    "windows": (lambda x: x.unflatten(1, (16, 2)).flip(2).flatten(1, 2), 2),
    "sort": (lambda x: x.sort(1).values, 2),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_mixing_call_between_two_attentions(mesh, name):
    """Its operand is brought back, and its result laid out again."""
    mix, left = MIXING[name]
    captured = laid_out(lambda x: attend(mix(attend(x))), mesh)
    assert moves(captured) == (left, 8 - left)


TOKEN_WISE = {
    "norm": lambda x: F.layer_norm(x, (8,)),
    "linear": lambda x: x @ torch.ones(8, 8),
    "flat": lambda x: x.reshape(-1, 8).tanh().reshape(2, 32, 8),
    "tokens first": lambda x: (
        x.transpose(0, 1).reshape(-1, 8).tanh().view(32, 2, 8).mT.mT.transpose(0, 1)
    ),
    "positions": lambda x: x + torch.linspace(0, 1, 32)[:, None],
    "table": lambda x: x * torch.ones(1, 32, 8).cumsum(1),
    "channels": lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
    "where": lambda x: torch.where((torch.arange(32) < 5)[:, None], x, -x),
    "gate": lambda x: x * x.sigmoid(),
    "several": lambda x: sum(x.chunk(2, -1)).repeat(1, 1, 2),
    "experts": lambda x: x.softmax(-1).topk(8, -1).values,
}


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_a_token_wise_call_between_two_attentions(mesh, name):
    assert moves(laid_out(lambda x: attend(TOKEN_WISE[name](attend(x))), mesh)) == (
        0,
        8,
    )
