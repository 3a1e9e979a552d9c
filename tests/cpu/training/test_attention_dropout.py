"""Attention dropout: the same mask for every number of ranks, strategy and layout.

Calls that are shared out drop weights by seeds and positions, so that what counts is
one rank with the same random state. Attention that returns its weights is plain
arithmetic, and its mask is that of one process without us.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import compare_calls
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import compiled, message_of
from tests.support.bounds import (
    Values,
    check,
    deviations,
    step,
)
from tests.support.settings import split

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """Attention and a projection, with dropout in and after the attention."""

    def __init__(
        self, attention: float = 0.2, hidden: float = 0.0, by_hand: bool = False
    ) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attention, self.hidden = attention, hidden

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(WIDTH, dim=-1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        dropout_p = self.attention if self.training else 0.0
        if self.by_hand:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            y = F.dropout(weights, dropout_p, self.training) @ v
        else:
            given = {"dropout_p": dropout_p, "is_causal": True}
            y = F.scaled_dot_product_attention(q, k, v, **given)
        y = self.out(y.transpose(1, 2).flatten(2))
        return x + F.dropout(y, self.hidden, self.training)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            again = self.checkpointed
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return (x * torch.linspace(-1, 1, WIDTH)).sin().mean()


class Weights(nn.Module):
    """Attention that returns its weights is plain arithmetic, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=True)
        return x + y + weights.square().sum(-1, keepdim=True)


MODELS = {
    "attention": lambda: Model(Layer()),
    "everywhere": lambda: Model(Layer(0.2, 0.1), Layer(0.3, 0.2)),
    "checkpointed": lambda: Model(Layer(0.2, 0.1), Layer(0.3), checkpointed=True),
    "by hand": lambda: Model(Layer(0.2, 0.1, by_hand=True), Layer(0.0, by_hand=True)),
    "weights": lambda: Model(Weights()),
}
STEPS = 2


def train(call, model: nn.Module, tokens) -> Values:
    """Losses and gradients of some steps, each with masks of its own, and what is left.

    "random state" is the one after the steps.
    """
    torch.manual_seed(11)
    found = {}
    for number in range(STEPS):
        values = step(call, model, tokens)
        found |= {f"{name} in step {number}": x for name, x in values.items()}
    return found | {"random state": torch.get_rng_state()}


def in_ranks(
    name: str, seq: int, ranks: int, door: str, options: dict
) -> tuple[Values, Tensor, list[bool]]:
    """What `ranks` ranks make of a model in float64, and the random state after it.

    And which calls were rewritten.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS[name]().train().double(), sequence_mesh(ranks)
    tokens = torch.randint(0, 50, (2, seq))
    options, settings = split(options)
    if door == "dtensor":
        tokens = cp.shard(tokens, mesh, 1)
    compiled = compiled_on(ranks, model, **options)
    with recording() as reports, settings:
        got = train(compiled, model, tokens)
    state = got.pop("random state")
    return got, state, [c.plan is not None for c in reports[0].calls]


# Tokens, ranks, how they are given, and options.
SETTINGS = {
    "even": (16, 2, "plain", {}),
    "uneven": (13, 3, "plain", {}),
    "uneven dtensors": (13, 3, "dtensor", {}),
    **{
        "-".join(map(str, options.values())): (18, 4, "plain", options)
        for options in (
            {"strategy": "ring", "layout": "contiguous"},
            {"strategy": "ring", "layout": "zigzag"},
            {"strategy": "ring", "unroll": 0},
            {"strategy": "all_gather"},
            {"strategy": "ulysses"},
            {"strategy": "hybrid"},
        )
    },
}
CASES = [
    (name, setting)
    for setting, (seq, *_) in SETTINGS.items()
    for name in (["everywhere"] if seq == 18 else MODELS)
    if name != "weights"
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_any_number_of_ranks(pools, name, setting):
    """Equals one rank, with another mask in each step and layer."""
    seq, ranks, door, options = SETTINGS[setting]
    ((exact, state, _),) = pools[1].run(in_ranks, name, seq, 1, "plain", {}, timeout=90)
    first, second = (exact[f"loss in step {number}"] for number in range(STEPS))
    assert first != second
    arguments = (in_ranks, name, seq, ranks, door, options)
    for got, own_state, rewritten in pools[ranks].run(*arguments, timeout=90):
        assert torch.equal(own_state, state)
        check(deviations(got, exact))
        assert all(rewritten) and rewritten


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("seq", [16, 13])
@on_ranks(2)
def test_the_mask_of_weights_is_that_of_one_device(seq, door):
    model = MODELS["weights"]().train().double()
    tokens = torch.randint(0, 50, (2, seq))
    wanted = train(torch.compile(model, backend="aot_eager"), model, tokens)
    got, state, _ = in_ranks("weights", seq, 2, door, {"strict": False})
    assert torch.equal(state, wanted.pop("random state"))
    check(deviations(got, wanted))


def run_ranks_agree() -> list[float]:
    """Inductor draws other numbers than one process, but the same on every rank."""
    got, _, _ = in_ranks("everywhere", 16, 2, "plain", {"inner": "inductor"})
    return [x.double().sum().item() for x in got.values()]


def test_ranks_agree_with_inductor(pools):
    first, second = pools[2].run(run_ranks_agree, timeout=120)
    assert first == second


@on_ranks(2)
def test_nothing_is_gathered_in_evaluation():
    model = MODELS["everywhere"]().eval().double()
    tokens = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        found = compare_calls(model, [(tokens,)], 2, shard={"tokens": 1})
    found.check()
    assert found.rewritten == [True, True]


@on_ranks(2)
def test_a_probability_of_one_is_refused():
    """Torch takes it, and gives zeros; weights that are divided by 1 - p are none."""
    call = compiled(Model(Layer(1.0)).train())
    text = message_of(lambda: call(torch.zeros(2, 16).long()))
    assert "attention at layers.0 (node " in text
    assert "got dropout_p=1.0; needed a probability in [0, 1)" in text
