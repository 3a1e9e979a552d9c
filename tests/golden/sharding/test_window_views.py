"""Tokens in windows, and windows of tokens that are joined, in uneven parts."""

import pytest
import torch
from torch import nn

from tests.golden.capture import sharded
from tests.golden.golden_text import assert_golden, table
from tests.golden.operands import attend

MESH_AXES = {"cp": 2}
in_three = pytest.mark.parametrize("mesh", [3], indirect=True)


def windowed(call):
    """Attention, and windows of 4 tokens, 10 of them on 3 ranks."""
    return lambda x: call(attend(x, 2)).sin()


def cut_and_joined(x):
    return x.view(2, 10, 4, 8).softmax(2).view(2, 40, 8)


@in_three
def test_windows_and_back(mesh):
    """Ranks have 14, 14 and 12 tokens, and 4, 4 and 2 windows."""
    captured = sharded(windowed(cut_and_joined), mesh, 2, 40, 8)
    assert_golden(
        captured.lines("move_tokens", "reshape", "softmax"),
        """\
cp_move_tokens = cp_move_tokens([flatten], 1, 'pad', 0, 8, 'constant',
    fill=0)  # [2, 48, 8] S(1)
reshape = reshape(cp_move_tokens, [2, 12, 4, 8])  # [2, 12, 4, 8] S(1)
cp_move_tokens_1 = cp_move_tokens([reshape], 1, 'slice', None, 10,
    1)  # [2, 10, 4, 8] S(1)
softmax = .softmax(cp_move_tokens_1, 2)  # [2, 10, 4, 8] S(1)
cp_move_tokens_2 = cp_move_tokens([softmax], 1, 'pad', 0, 2, 'constant',
    fill=0)  # [2, 12, 4, 8] S(1)
reshape_1 = reshape(cp_move_tokens_2, [2, 48, 8])  # [2, 48, 8] S(1)
cp_move_tokens_3 = cp_move_tokens([reshape_1], 1, 'slice', None, 40,
    1)  # [2, 40, 8] S(1)
sin = .sin(cp_move_tokens_3)  # [2, 40, 8] S(1)""",
    )


def in_columns(columns):
    """3 rows of windows of 2 x 2, in so many columns, of 4 or of 2 samples."""

    def call(x):
        windows = x.view(x.shape[0], 3, 2, columns, 2, -1).transpose(2, 3)
        return attend(windows.reshape(-1, 4, x.shape[-1])).view(windows.shape).sin()

    return call


def unrolled(x):
    """Places in a window come before windows, as in Hiera."""
    places = x.view(2, 3, 2, 3, 2, 8).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    return places.sin().reshape(2, 36, 8)


EXCHANGES = {  # ranks have two rows of windows, and one
    "for samples": (in_columns(3), (2, 36, 8)),
    "for columns": (in_columns(4), (3, 48, 8)),
    "for a part of what is flattened": (unrolled, (2, 36, 8)),
}


def test_uneven_rows_of_windows_are_exchanged(mesh):
    texts = {}
    for name, (call, shape) in EXCHANGES.items():
        captured = sharded(windowed(call), mesh, *shape)
        texts[name] = captured.lines("= reshape", "exchange", "= .sin(", "replicated")
    assert_golden(
        table(texts),
        """\
for samples:
  reshape_1 = reshape(cp_move_tokens, [2, 4, 2, 3, 2, 8])  # [2, 4, 2, 3, 2, 8] S(1)
  cp_exchange = cp_exchange(windows, 1, 0)  # [2, 3, 3, 2, 2, 8] S(0)
  reshape = reshape(cp_exchange, [18, 4, 8])  # [18, 4, 8] S(0)
  sin = .sin(view_1)  # [2, 3, 3, 2, 2, 8] S(0)
  sin_1 = .sin(sin)  # [2, 3, 3, 2, 2, 8] S(0)
for columns:
  reshape_1 = reshape(cp_move_tokens, [3, 4, 2, 4, 2, 8])  # [3, 4, 2, 4, 2, 8] S(1)
  cp_exchange = cp_exchange(windows, 1, 2)  # [3, 3, 4, 2, 2, 8] S(2)
  reshape = reshape(cp_exchange, [36, 4, 8])  # [36, 4, 8] _S(0, 9)
  sin = .sin(view_1)  # [3, 3, 4, 2, 2, 8] S(2)
  sin_1 = .sin(sin)  # [3, 3, 4, 2, 2, 8] S(2)
for a part of what is flattened:
  reshape_1 = reshape(cp_move_tokens, [2, 4, 2, 3, 2, 8])  # [2, 4, 2, 3, 2, 8] S(1)
  sin = .sin(places)  # [8, 3, 3, 8] S(1)
  cp_exchange = cp_exchange(sin, 1, 0)  # [8, 3, 3, 8] S(0)
  reshape = reshape(cp_exchange, [2, 36, 8])  # [2, 36, 8] S(0)
  sin_1 = .sin(reshape)  # [2, 36, 8] S(0)""",
    )


def test_uneven_rows_of_one_samples_windows_move_at_borders(mesh):
    """Ranks have 6 and 3 windows by rows, and 5 and 4 in the batch."""
    captured = sharded(windowed(in_columns(3)), mesh, 1, 36, 8)
    assert_golden(
        captured.lines("exchange", "= cp_move_tokens", "= reshape"),
        """\
cp_move_tokens = cp_move_tokens([flatten], 1, 'pad', 0, 12, 'constant',
    fill=0)  # [1, 48, 8] S(1)
reshape_1 = reshape(cp_move_tokens, [1, 4, 2, 3, 2, 8])  # [1, 4, 2, 3, 2, 8] S(1)
cp_move_tokens_1 = cp_move_tokens([reshape_1], 1, 'slice', None, 3,
    1)  # [1, 3, 2, 3, 2, 8] S(1)
cp_move_tokens_2 = cp_move_tokens([windows], 1, 'pad', 0, 1, 'constant',
    fill=0)  # [1, 4, 3, 2, 2, 8] S(1)
reshape_2 = reshape(cp_move_tokens_2, [12, 4, 8])  # [12, 4, 8] S(0)
cp_move_tokens_3 = cp_move_tokens([reshape_2], 0, 'slice', None, 9, 1)  # [9, 4, 8] S(0)
cp_move_tokens_4 = cp_move_tokens([flatten_1], 0, 'pad', 0, 3, 'constant',
    fill=0)  # [12, 4, 8] S(0)
reshape_3 = reshape(cp_move_tokens_4, [1, 4, 3, 2, 2, 8])  # [1, 4, 3, 2, 2, 8] S(1)
cp_move_tokens_5 = cp_move_tokens([reshape_3], 1, 'slice', None, 3,
    1)  # [1, 3, 3, 2, 2, 8] S(1)""",
    )


def test_what_ranks_do_not_divide_is_gathered(mesh):
    captured = sharded(windowed(in_columns(3)), mesh, 3, 36, 8)
    assert "cp_exchange" not in captured.text
    assert "= cp_replicated(" in captured.text


VIEWS = {
    "a grid": lambda x: x.reshape(2, 10, 2, 2, 8).amax(2),
    "unflatten": lambda x: x.unflatten(1, (10, 4)).amax(2),
    "unfold": lambda x: x.unfold(1, 4, 4).amax(-1),
    "tokens of a slice": lambda x: x[:, :20].reshape(2, 5, 4, 8).amax(2),
}


@in_three
@pytest.mark.parametrize("name", VIEWS)
def test_every_word_for_it(mesh, name):
    captured = sharded(windowed(VIEWS[name]), mesh, 2, 40, 8)
    assert "cp_replicated" not in captured.text
    assert "'pad'" in captured.text


STAYS = {
    "every rank has whole ones": lambda x: x[:, :36].view(2, 9, 4, 8).amax(2),
    "channels": lambda x: x.view(2, 40, 4, 2).amax(2),
    "a rank would have none": lambda x: x.view(2, 2, 20, 8).amax(2),
}


@in_three
@pytest.mark.parametrize("name", STAYS)
def test_a_twin_stays(mesh, name):
    captured = sharded(windowed(STAYS[name]), mesh, 2, 40, 8)
    assert "'pad'" not in captured.text


class Products(nn.Module):
    """A product for every token, of two rows of a batch."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(2, 1, 4, 3))

    def forward(self, x):
        y = attend(x, 2).unflatten(-1, (2, 4))
        return self.form(y, self.weight).sin()


PRODUCTS = {
    "of both": lambda y, w: torch.matmul(y, y.mT),
    "the same for all": lambda y, w: torch.matmul(y, w),
    "einsum": lambda y, w: torch.einsum("bshd,bshe->bsde", y, y),
}


def test_products_for_every_token(mesh):
    texts = {}
    for name, form in PRODUCTS.items():
        captured = sharded(Products(form), mesh, 2, 37, 8)
        texts[name] = captured.lines("products(", "= cp_replicated")
    assert_golden(
        table(texts),
        """\
of both: matmul = cp_token_products(None, y, mT, (1, 1, 1))  # [2, 37, 2, 2] S(1)
the same for all: matmul = cp_token_products(None, y, cp_replicate,
    (1, None, 1))  # [2, 37, 2, 3] S(1)
einsum: einsum = cp_token_products('bshd,bshe->bsde', y, y,
    (1, 1, 1))  # [2, 37, 4, 4] S(1)""",
    )


ROWS = {
    "rows": lambda y, w: torch.matmul(y.transpose(1, 2), w),
    "one entry": lambda y, w: torch.matmul(y[:1], y[:1].mT),
}


@pytest.mark.parametrize("name", ROWS)
def test_products_of_dtensor_stay(mesh, name):
    captured = sharded(Products(ROWS[name]), mesh, 2, 40, 8)
    assert "products(" not in captured.text and "cp_replicated" not in captured.text


def written(x, index, part):
    y = torch.zeros_like(x)
    y[index] = part
    return y


WRITES = {
    "tokens and channels": lambda x: written(
        x, (slice(None), slice(1, None), slice(4)), x[:, :-1, :4]
    ),
    "a number": lambda x: (
        written(x, (slice(None), slice(3, 30), slice(4, None)), 1.0) + x
    ),
}


def test_writes_to_tokens_and_channels(mesh):
    texts = {}
    for name, call in WRITES.items():
        captured = sharded(windowed(call), mesh, 2, 40, 8)
        texts[name] = captured.lines("= cp_local_write", "assign", "= cp_replicated(")
    assert_golden(
        table(texts),
        """\
tokens and channels:
  cp_move_tokens_1 = cp_move_tokens([getitem_2, getitem], 1, 'assign', 1, None,
      None)  # [2, 40, 4] S(1)
  cp_local_write = cp_local_write(y, cp_move_tokens_1, (S(1),),
      getitem)  # [2, 40, 8] S(1)
a number:
  cp_move_tokens = cp_move_tokens([getitem_1], 1, 'assign', 3, 30, None,
      fill=1)  # [2, 40, 4] S(1)
  cp_local_write = cp_local_write(y, cp_move_tokens, (S(1),),
      getitem)  # [2, 40, 8] S(1)""",
    )


class Layer(nn.Module):
    """A linear layer on the rows of a grid of 4 columns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        return self.linear(attend(x, 2).view(2, -1, 4, 8)).sin()


@in_three
def test_a_layer_on_uneven_rows(mesh):
    """DTensor would gather 10 rows of 4 tokens on 3 ranks."""
    captured = sharded(Layer(), mesh, 2, 40, 8)
    assert "cp_replicated" not in captured.text
    assert_golden(
        captured.lines("= cp_linear_of_parts"),
        """\
cp_linear_of_parts = cp_linear_of_parts(cp_move_tokens_1, cp_replicate,
    cp_replicate_1)  # [2, 10, 4, 6] S(1)""",
    )
