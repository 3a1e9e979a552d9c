"""Attention dropout: refused if strict, otherwise with the mask that one device draws.

The reference is one process that compiles the same model with aot_eager, in float64 and
from the same random state. All draw the same numbers in the same order, so results
differ by rounding only, as those of one process in float32 do, and the random states
are equal in the end.
"""

import copy
import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import logs
from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, check, deviation, step

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """Attention and a projection, with dropout in and after the attention."""

    def __init__(self, attention: float = 0.2, hidden: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attention, self.hidden = attention, hidden

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(WIDTH, dim=-1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        dropout_p = self.attention if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
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
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return (x * torch.linspace(-1, 1, WIDTH)).sin().mean()


class Weights(nn.Module):
    """Attention that returns its weights is plain arithmetic, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=True)
        return x + y + weights.square().sum(-1, keepdim=True)


def encoder_layer(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=0.2, batch_first=batch_first
    )


MODELS = {
    "attention": lambda: Model(Layer()),
    "everywhere": lambda: Model(Layer(0.2, 0.1), Layer(0.3, 0.2)),
    "in one layer": lambda: Model(Layer(0.0, 0.1), Layer(0.3), Layer(0.0, 0.1)),
    "checkpointed": lambda: Model(Layer(0.2, 0.1), Layer(0.3), checkpointed=True),
    "module": lambda: Model(encoder_layer(), encoder_layer()),
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


def one_process(name: str, dtype: torch.dtype, seq: int) -> Values:
    """What one process makes of the model of `run_dropout` in a dtype."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().train().to(dtype)
    tokens = torch.randint(0, 50, (2, seq))
    return train(torch.compile(model, backend="aot_eager"), model, tokens)


def run_dropout(
    name: str, seq: int, world: int, door: str, inner: str = "aot_eager"
) -> tuple[list[Deviation], bool, list[bool]]:
    """Deviations, whether the random states agree, which calls were rewritten."""
    exact, rough = (
        one_process(name, dtype, seq) for dtype in (torch.float64, torch.float32)
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS[name]().train(), sequence_mesh(world)
    tokens = torch.randint(0, 50, (2, seq))
    options = {"inner": inner, "strict": False}
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
    else:
        tokens = cp.shard(tokens, mesh, 1)
    compiled = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        got = train(compiled, model, tokens)
    state = rough.pop("random state")
    same_state = torch.equal(got.pop("random state"), state)
    # Losses are means of sines, which cancel: their errors are those of such numbers.
    found = [
        deviation(name, x, exact[name], rough[name], floor=float(x.ndim == 0))
        for name, x in got.items()
    ]
    rewritten = [c.plan is not None for c in reports[0].calls]
    return found, same_state, rewritten


REWRITTEN = {
    "attention": [False],
    "everywhere": [False, False],
    "in one layer": [True, False, True],
    "checkpointed": [False, False],
    "module": [False, False],
    "weights": [],
}


@pytest.mark.core("attention-13-plain")
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", MODELS)
def test_the_mask_is_that_of_one_device(pools, name, seq, door):
    for found, same_state, rewritten in pools[2].run(
        run_dropout, name, seq, 2, door, timeout=90
    ):
        check(found)
        assert same_state
        assert rewritten == REWRITTEN[name]


@pytest.mark.slow
def test_on_three_ranks(pools):
    for found, same_state, _ in pools[3].run(
        run_dropout, "everywhere", 16, 3, "plain", timeout=90
    ):
        check(found)
        assert same_state


def run_ranks_agree() -> list[float]:
    """Inductor draws other numbers than one process, but the same on every rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS["everywhere"]().train(), sequence_mesh(2)
    tokens = torch.randint(0, 50, (2, 16))
    options = {"strict": False, "mesh": mesh, "shard": {"tokens": 1}}
    compiled = torch.compile(model, backend="cp", options=options)
    return [x.double().sum().item() for x in train(compiled, model, tokens).values()]


@pytest.mark.slow
def test_ranks_agree_with_inductor(pools):
    first, second = pools[2].run(run_ranks_agree, timeout=120)
    assert first == second


def run_without_training() -> tuple[Deviation, list[bool]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS["everywhere"]().eval(), sequence_mesh(2)
    tokens = torch.randint(0, 50, (2, 16))
    exact, rough = copy.deepcopy(model).double()(tokens), model(tokens)
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    compiled = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        found = deviation("loss", compiled(tokens), exact, rough, floor=1.0)
    return found, [c.plan is not None for c in reports[0].calls]


def test_nothing_is_gathered_in_evaluation(pools):
    for found, rewritten in pools[2].run(run_without_training, timeout=60):
        check([found])
        assert rewritten == [True, True]


def run_refused(strict: bool) -> tuple[str, list[str]]:
    """What is raised, and what is logged, for a model of two equal layers."""
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("cpcompile")
    logger.addHandler(handler)
    options = {"mesh": sequence_mesh(2), "shard": {"tokens": 1}, "strict": strict}
    model = Model(Layer(), Layer()).train()
    step = torch.compile(model, backend="cp", options=options | {"inner": "aot_eager"})
    try:
        step(torch.randint(0, 50, (2, 16)))
        return "nothing was raised", messages
    except Exception as error:
        return f"{type(error).__name__}: {error}", messages
    finally:
        logger.removeHandler(handler)


def test_strict_refuses_and_says_how_to_mend_it(pools):
    for text, _ in pools[2].run(run_refused, True):
        assert "DropoutUnsupported: attention at layers.0 (node " in text
        assert "got dropout_p=0.2; needed 0.0" in text
        assert "set the model's attention dropout to 0, or call eval()" in text
        assert "options={'strict': False}" in text


def test_otherwise_each_call_is_one_warning(pools):
    for text, messages in pools[2].run(run_refused, False):
        assert text == "nothing was raised"
        assert len(messages) == 2
        for layer, message in enumerate(messages):
            assert f"scaled_dot_product_attention at layers.{layer} (File " in message
            assert "runs on gathered tensors" in message
            assert "got dropout_p=0.2" in message
            assert "options=" not in message
