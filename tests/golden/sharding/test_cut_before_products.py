"""A cut of a wide result becomes a cut of what a product reads, or stays."""

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

from cpcompile.passes.model.normalize.cut_before_products import cut_before_products
from tests.golden.capture import body, sharded
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend
from tests.support.bounds import assert_close
from tests.support.dynamo_graphs import dynamo_graph

WORDS = 64
WEIGHT, BIAS = torch.randn(WORDS, 8).double(), torch.randn(WORDS).double()


def test_logits_of_the_next_token(mesh):
    """The hidden states move, eight numbers a token, and the loss follows the head."""

    def shifted(x, weight):
        logits = F.linear(attend(x, 2), weight).float()[..., :-1, :]
        return logits.logsumexp(-1)

    captured = sharded(shifted, mesh, 2, 40, 8, more=(WEIGHT.float(),))
    assert captured["cut_before_products"].rewrites == 1
    text = body(captured)
    assert_golden(
        text[text.index("\nflatten = ") : text.index("\ncp_gather")],
        """
flatten = .flatten(transpose_1, 2)
cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', None, -1, None)
cp_replicate = cp_replicate(l_weight_)
linear = linear(cp_move_tokens, cp_replicate)
float_1 = .float(linear)
logsumexp = .logsumexp(float_1, -1)""",
    )


def logits(x):
    return F.linear(x, WEIGHT, BIAS)


MOVED = {
    "slice": lambda x: logits(x)[:, 1:],
    "last": lambda x: logits(x)[:, -1:, :],
    "steps": lambda x: logits(x)[:, ::2],
    "from the end": lambda x: logits(x)[..., 2:-1, :],
    "of the batch": lambda x: logits(x)[:1],
    "narrow": lambda x: logits(x).narrow(1, 1, 3),
    "cast and cap": lambda x: (30 * (logits(x).double() / 30).tanh())[:, :-1],
    "added by token": lambda x: (logits(x) + x.sum(-1, keepdim=True))[:, 1:],
    "einsum": lambda x: torch.einsum("bsd,vd->bsv", x, WEIGHT)[:, 1:],
    "transposed": lambda x: (x @ WEIGHT.mT).transpose(0, 1)[1:],
    "twice": lambda x: logits(x)[:, 1:] + logits(x)[:, 1:].exp(),
    "two readers": lambda x: (lambda y: y[:, 1:].exp() + y[:, 1:])(logits(x)),
    "of one of two factors": lambda x: (x @ x.mT.repeat(1, 1, 8))[:, 1:],
}
STAYS = {
    "read whole": lambda x: (lambda y: y[:, 1:].sum() + y.exp().sum())(logits(x)),
    "two cuts": lambda x: (lambda y: y[:, 1:] - y[:, :-1])(logits(x)),
    "words": lambda x: logits(x)[..., :5],
    "words and tokens": lambda x: logits(x)[:, 1:, :5],
    "one token": lambda x: logits(x)[:, -1],
    "narrower": lambda x: F.linear(logits(x), WEIGHT.mT)[:, 1:],
    "no product": lambda x: x.exp()[:, 1:],
    "along tokens": lambda x: logits(x).cumsum(1)[:, 1:],
    "dropped": lambda x: F.dropout(logits(x), 0.5)[:, 1:],
    "drawn": lambda x: (lambda y: (y * torch.rand_like(y))[:, 1:])(logits(x)),
    "a view": lambda x: logits(x).flatten(1)[1:],
    "the last dimension": lambda x: torch.einsum("bsd,vd->bvs", x, WEIGHT)[..., 1:],
    "positions": lambda x: logits(x)[:, torch.tensor([1, 3])],
}


@pytest.mark.parametrize("name", [*MOVED, *STAYS])
def test_the_result_is_the_same(name):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    fn = (MOVED | STAYS)[name]
    gm = dynamo_graph(fn, x)
    torch.manual_seed(1)
    wanted = fn(x)
    before = str(gm.graph)
    moved = cut_before_products(gm.graph, None)
    assert (moved > 0) == (name in MOVED)
    assert moved or str(gm.graph) == before
    for node in gm.graph.nodes:
        if node.name == "output":
            (result,) = node.args[0]
            assert result.meta["example_value"].shape == wanted.shape
    gm.recompile()
    named = {"x": x, "weight": WEIGHT, "bias": BIAS}
    inputs = [
        next(v for k, v in named.items() if k in n.name.lower())
        for n in gm.graph.find_nodes(op="placeholder")
    ]
    torch.manual_seed(1)
    (got,) = fx.Interpreter(gm).run(*inputs)
    assert_close("result", got, wanted)


SYMBOLS = {
    "from the end": lambda x, y: logits(x)[:, -y.shape[1] - 1 : -1],
    "from the begin": lambda x, y: logits(x)[:, : y.shape[1]].exp(),
    "of joined tokens": lambda x, y: logits(x)[:, torch.cat([y, y], 1).shape[1] :],
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_bounds_that_are_symbols(name):
    """The number is computed before the product, also if the model reads it late."""
    x, y = torch.randn(2, 9, 8, dtype=torch.float64), torch.ones(2, 3)
    torch._dynamo.mark_dynamic(y, 1)
    gm = dynamo_graph(SYMBOLS[name], x, y)
    assert cut_before_products(gm.graph, None) == 1
    gm.graph.lint()
    gm.recompile()
    for length in (3, 4):
        y = torch.ones(2, length)
        named = {"l_x_": x, "l_y_": y, "weight": WEIGHT, "bias": BIAS}
        inputs = [
            next((v for k, v in named.items() if k in n.name.lower()), length)
            for n in gm.graph.find_nodes(op="placeholder")
        ]
        (got,) = fx.Interpreter(gm).run(*inputs)
        assert_close("result", got, SYMBOLS[name](x, y))
