"""What is proved token-wise, and that what is proved is true."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from cpcompile.passes.flow.flow import Flows
from cpcompile.passes.graph.constant_arguments import Callee
from cpcompile.passes.graph.loss_calls import ELEMENTWISE
from cpcompile.passes.graph.sequence_tokens import TokenDim, candidate_dims, token_dim
from cpcompile.passes.placement.global_losses import cp_loss
from cpcompile.passes.placement.placement_calls import cp_mean
from tests.golden.capture import fake_group
from tests.unit.passes.token_cases import (
    CUBE_CALLS,
    NOT_PROVED,
    TOKENS,
    Input,
    Prover,
    full,
    ids,
    seq,
)


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    torch.manual_seed(0)
    with fake_group(0, 4):
        yield Prover(2)


X = (2, TOKENS, 6)  # of most inputs


def rotate(x, table):
    """Rotary embeddings."""
    first, second = x.chunk(2, -1)
    return x * table.cos() + torch.cat([-second, first], -1) * table.sin()


# name: call, inputs, and the tokens of constants by the number of the input.
PROVED: dict[str, tuple[Any, ...]] = {
    "pointwise": (lambda x: F.gelu(x) * 2 + x.sigmoid(), seq(*X)),
    "linear": (F.linear, seq(*X), full(8, 6), full(8)),
    "matmul": (torch.matmul, seq(*X), full(6, 8)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), seq(*X), full(6)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), seq(*X), full(6)),
    "embedding": (F.embedding, ids(2, TOKENS), full(4, 6)),
    "index of a table": (lambda i, w: w[i], ids(2, TOKENS), full(4, 6)),
    "flatten": (lambda x: x.flatten(0, 1), seq(*X)),
    "view": (lambda x: x.view(-1, 6), seq(*X)),
    "unflatten": (lambda x: x.view(2, TOKENS, 6), seq(8, 6, dim=0, outer=2)),
    "heads": (lambda x: x.unflatten(-1, (2, 3)).transpose(1, 2), seq(*X)),
    "heads back": (lambda x: x.transpose(1, 2).flatten(2), seq(2, 2, 4, 3, dim=2)),
    "tokens first": (lambda x: x.transpose(0, 1).reshape(8, 6), seq(*X)),
    "tokens of tokens": (lambda x: x.reshape(2, 12, 2), seq(*X)),
    "chunk": (lambda x: x.chunk(3, -1), seq(*X)),
    "split": (lambda x: x.split([2, 4], -1)[1], seq(*X)),
    "slice": (lambda x: x[..., 2:], seq(*X)),
    "cat": (lambda x, y: torch.cat([x, y], -1), seq(*X), seq(*X)),
    "where": (lambda x: torch.where(x > 0, x, -x), seq(*X)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), seq(*X)),
    "softmax": (lambda x: x.softmax(-1), seq(*X)),
    "topk": (lambda x: x.topk(2, -1), seq(*X)),
    "cumsum of channels": (lambda x: x.cumsum(-1), seq(*X)),
    "roll of channels": (lambda x: x.roll(1, -1), seq(*X)),
    "sum": (lambda x: x.sum(1), seq(*X)),
    "sum of all": (lambda x: x.sum(), seq(*X)),
    "norm": (lambda x: x.norm(), seq(*X)),
    "beside the sum": (lambda x: x - x.sum(1, keepdim=True), seq(*X)),
    "largest": (lambda x: x.amax((1, 2)), seq(*X)),
    "weights": (lambda x, y: x.mT @ y, seq(*X), seq(*X)),
    "table [S]": (torch.add, seq(2, 6, TOKENS, dim=2), full(4), {1: TokenDim(0)}),
    "table [S, C]": (torch.add, seq(*X), full(4, 6), {1: TokenDim(0)}),
    "table [1, S, C]": (torch.add, seq(*X), full(1, 4, 6), {1: TokenDim(1)}),
    "table [B, S, 1]": (torch.mul, seq(*X), full(2, 4, 1), {1: TokenDim(1)}),
    "table [B * S]": (
        *(lambda x, t: x * t[:, None], seq(8, 6, dim=0, outer=2), full(8)),
        {1: TokenDim(0, 2)},
    ),
    "table [B, S] of another": (
        *(lambda x, t: torch.where(t[..., None] > 0, x, 0.0), seq(*X), full(2, 4)),
        {1: TokenDim(1)},
    ),
    "rotary": (rotate, seq(2, 2, 4, 6, dim=2), full(4, 6), {1: TokenDim(0)}),
    "weights of tokens": (lambda x, w: w @ x, seq(*X), full(3, 4), {1: TokenDim(1)}),
    "tokens twice": (lambda x: torch.stack([x, x], 2).flatten(1, 2), seq(*X)),
    "biases": (torch.add, seq(*X), full(6)),
    "one for all": (torch.mul, seq(*X), full(1, 1, 6)),
}

# DTensor gathers some of these by itself; for others it is asked to.
MIXING: dict[str, tuple[Any, ...]] = {
    "roll": (lambda x: x.roll(1, 1), seq(*X)),
    "roll from the end": (lambda x: x.roll(1, -2), seq(*X)),
    "flip": (lambda x: x.flip(1), seq(*X)),
    "cumsum": (lambda x: x.cumsum(1), seq(*X)),
    "cumsum from the end": (lambda x: x.cumsum(-2), seq(*X)),
    "cumprod from the end": (lambda x: x.cumprod(-2), seq(*X)),
    "logcumsumexp from the end": (lambda x: x.logcumsumexp(-2), seq(*X)),
    "cumsum of a table": (lambda x, t: x * t.cumsum(-2), seq(*X), full(4, 6)),
    "cummax": (lambda x: x.cummax(1), seq(*X)),
    "sort": (lambda x: x.sort(1), seq(*X)),
    "topk": (lambda x: x.topk(2, 1), seq(*X)),
    "softmax": (lambda x: x.softmax(1), seq(*X)),
    "max": (lambda x: x.max(1), seq(*X)),
    "argmax": (lambda x: x.argmax(1), seq(*X)),
    "argmax of all": (lambda x: x.argmax(), seq(*X)),
    "median": (lambda x: x.median(1), seq(*X)),
    "conv": (lambda x, w: F.conv1d(x.mT, w, padding=1), seq(*X), full(6, 6, 3)),
    "pooling": (lambda x: F.avg_pool1d(x.mT, 2), seq(*X)),
    "interpolation": (lambda x: F.interpolate(x.mT, scale_factor=2), seq(*X)),
    "half": (lambda x: x[:, 2:], seq(*X)),
    "last": (lambda x: x[:, -1], seq(*X)),
    "every second": (lambda x: x[:, ::2], seq(*X)),
    "chunks": (lambda x: x.chunk(2, 1), seq(*X)),
    "cat": (lambda x, y: torch.cat([x, y], 1), seq(*X), seq(*X)),
    "scores": (lambda x: x @ x.mT, seq(*X)),
    "tril": (torch.tril, seq(2, TOKENS, TOKENS)),
    "triu": (torch.triu, seq(2, TOKENS, TOKENS, dim=2)),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), seq(2, TOKENS, TOKENS)),
    "transposed": (lambda x: x + x.mT, seq(2, TOKENS, TOKENS)),
    "diff": (lambda x: x.diff(dim=1), seq(*X)),
    "unfold": (lambda x: x.unfold(1, 2, 1), seq(*X)),
    "windows": (lambda x: x.unflatten(1, (2, 2)).flip(2), seq(*X)),
    "index_select": (
        *(lambda x, i: x.index_select(1, i), seq(*X)),
        ids(4, dim=None),
    ),
    "index": (lambda x, i: x[:, i], seq(*X), ids(4, dim=None)),
    "gather": (lambda x, i: x.gather(1, i), seq(*X), ids(*X, dim=None)),
    "pad": (lambda x: F.pad(x, (0, 0, 1, -1)), seq(*X)),
    "one_hot": (lambda x: F.one_hot(x, 4), ids(2, TOKENS)),
    "repeat": (lambda x: x.repeat(1, 2, 1), seq(*X)),
    "one token for all": (lambda x: x[:, :1].expand(X), seq(*X)),
    "another split": (lambda x: x.reshape(4, 2, 6), seq(8, 6, dim=0, outer=2)),
    "over the batch too": (lambda x: x.flatten(0, 1).cumsum(0), seq(*X)),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        seq(2, 2, TOKENS, 3, dim=2),
    ),
    "local part": (lambda x: x.to_local(), seq(*X)),
    "random": (torch.bernoulli, Input(torch.full(X, 0.5), TokenDim(1))),
    "drawn like": (torch.rand_like, seq(*X)),
}


@pytest.mark.parametrize("name", PROVED)
def test_proved(prover, name):
    call, *rest = PROVED[name]
    constants = rest.pop() if isinstance(rest[-1], dict) else {}
    assert prover.prove(call, *rest) == constants


@pytest.mark.parametrize("name", MIXING)
def test_not_proved(prover, name):
    call, *inputs = MIXING[name]
    assert prover.prove(call, *inputs) == NOT_PROVED


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy(prover, reduction):
    """Targets are placed where their logits are, and counted whole."""
    logits, targets = seq(8, 4, dim=0, outer=2), ids(8, dim=0, outer=2)
    whole = Input(targets.x, plain=True)
    loss = Callee(F.cross_entropy)

    def on_tokens(logits, target, whole):
        return cp_loss(loss, logits, target, whole, reduction, ignore_index=1)

    def twin(logits, target, _):
        return F.cross_entropy(logits, target, ignore_index=1, reduction=reduction)

    assert prover.prove(on_tokens, logits, targets, whole, twin=twin) == {}


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("loss", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_losses(prover, loss, reduction):
    values = [Input(torch.rand(X).double(), TokenDim(1)) for _ in range(2)]

    def on_tokens(x, target):
        return cp_loss(Callee(loss), x, target, None, reduction)

    def twin(x, target):
        return loss(x, target, reduction=reduction)

    assert prover.prove(on_tokens, *values, twin=twin) == {}


def test_means(prover):
    for dims in (1, (1, 2), None):
        assert prover.prove(cp_mean, seq(*X), dims, True, None) == {}


@pytest.mark.usefixtures("prover")
def test_two_axes():
    """The batch is on one axis, the tokens of a rank's rows on the other."""
    prover = Prover(2, 2)
    x = Input(torch.randn(2, TOKENS, 6).double(), TokenDim(1), batch=True)
    assert prover.prove(lambda x: x.tanh().flatten(0, 1), x) == {}
    assert prover.prove(torch.add, x, full(4, 6)) == {1: TokenDim(0)}
    assert prover.prove(lambda x: x.sum((0, 1)), x) == {}
    assert prover.prove(lambda x: x.softmax(1), x) == NOT_PROVED


@pytest.mark.parametrize("dim", range(3))
def test_no_proof_is_wrong_where_all_sizes_are_equal(prover, dim):
    proofs = [
        prover.prove(call, seq(4, 4, 4, dim=dim), full(4, 4, 4))
        for call in CUBE_CALLS.values()
    ]
    assert proofs.count(NOT_PROVED) > 15
    assert len(proofs) - proofs.count(NOT_PROVED) > 50


@st.composite
def reshapes(draw):
    """(shape, where its tokens are, dims to transpose or shapes to take, in order)."""

    def shape():
        sizes, left = [], 64
        while left > 1:
            sizes.append(draw(st.sampled_from([n for n in (2, 4, 8) if n <= left])))
            left //= sizes[-1]
        return tuple(draw(st.permutations(sizes)))

    first = shape()
    dims = candidate_dims(first, TOKENS)
    assume(dims)
    turns = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5))
    steps = [draw(turns) for _ in range(draw(st.integers(1, 3)))]
    return first, draw(st.sampled_from(dims)), [step or shape() for step in steps]


@settings(max_examples=100)
@given(reshapes())
def test_no_proof_of_views_is_wrong(prover, case):
    shape, dim, steps = case

    def turn(x):
        for step in steps:
            if len(step) == 2:
                x = x.transpose(*(dim % x.ndim for dim in step))
            else:
                x = x.reshape(step)
        return x

    prover.prove(turn, Input(torch.randn(shape), dim))


def test_a_proof_is_remembered(prover):
    call, x = torch.add, prover.distributed(seq(*X))
    table = prover.distributed(full(4, 6))
    result = prover.trial.must_run(call, (x, table), {})
    first = prover.proofs.prove(call, (x, table), {}, result)
    assert first == {1: TokenDim(0)}
    with mock.patch.object(Flows, "_ask") as ask:
        assert prover.proofs.prove(call, (x, table), {}, result) == first
    assert not ask.called
    again = prover.trial.must_run(call, (x, 1.0), {})
    assert prover.proofs.prove(call, (x, 1.0), {}, again) == {}


def test_results_have_to_be_where_they_are(prover):
    """Tokens of a result that lie elsewhere, or are gathered, are no proof."""
    x = prover.distributed(seq(2, 4, 4))
    for wrong in (seq(2, 4, 4, dim=2), full(2, 4, 4), seq(2, 4, 8)):
        assert (
            prover.proofs.prove(torch.neg, (x,), {}, prover.distributed(wrong)) is None
        )


def test_another_sequence_is_no_proof(prover):
    """Six tokens are sharded; the proofs are for four."""
    x = prover.distributed(seq(2, 6, 3))
    assert prover.proofs.prove(torch.neg, (x,), {}, x) is None


def test_where_tokens_are(prover):
    assert token_dim(torch.ones(4), 0, TOKENS) is None
    for each in (seq(2, 4), seq(4, 8), seq(8, dim=0, outer=2), seq(16, 1, dim=0)):
        assert token_dim(prover.distributed(each), 0, TOKENS) == each.dim
    assert token_dim(prover.distributed(full(2, 4)), 0, TOKENS) is None
    assert token_dim(prover.distributed(seq(2, 6)), 0, TOKENS) is None
    assert token_dim(prover.distributed(seq(2, 0)), 0, TOKENS) is None


def test_where_tokens_may_be():
    found = candidate_dims((4, 3, 8, 0, 2), TOKENS)
    assert found == [TokenDim(0), TokenDim(2), TokenDim(2, 2)]


def test_tokens_of_a_symbolic_length_are_no_numbers():
    """A width that happens to be as large as the length has no tokens."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dims = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    value = mode.from_tensor(torch.ones(TOKENS, 2 * TOKENS), symbolic_context=dims)
    shape = (*value.shape, TOKENS)
    found = [TokenDim(0), TokenDim(1), TokenDim(1, 2)]
    assert candidate_dims(shape, TOKENS, symbolic=True) == found
    assert candidate_dims(shape, TOKENS) == [TokenDim(2)]
    assert not environment.guards
