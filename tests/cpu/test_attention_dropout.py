"""Attention dropout: refused if strict, otherwise with the mask that one device draws.

The reference is one process that compiles the same model with aot_eager, from the same
random state. Both draw the same numbers in the same order, so results differ by
rounding only, and the random states are equal in the end.
"""

import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import logs
from cpcompile.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.test_programs import gradients, relative_error

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


def train(step, model: nn.Module, tokens) -> list[Tensor]:
    """Loss and gradients of some steps, each with masks of its own."""
    torch.manual_seed(11)
    found = []
    for _ in range(STEPS):
        loss = step(tokens)
        found += [loss.detach(), *gradients(loss, model)]
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    return [*found, torch.get_rng_state()]


def run_dropout(
    name: str, seq: int, world: int, door: str, inner: str = "aot_eager"
) -> tuple[list[float], bool, list[bool]]:
    """Relative errors, whether the random states agree, which calls were rewritten."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS[name]().train(), sequence_mesh(world)
    tokens = torch.randint(0, 50, (2, seq))
    *wanted, state = train(torch.compile(model, backend=inner), model, tokens)
    torch._dynamo.reset()
    options = {"inner": inner, "strict": False}
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
    else:
        tokens = cp.shard(tokens, mesh, 1)
    step = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        *got, own_state = train(step, model, tokens)
    errors = [relative_error(x, y) for x, y in zip(got, wanted, strict=True)]
    rewritten = [c.plan is not None for c in reports[0].calls]
    return errors, torch.equal(own_state, state), rewritten


REWRITTEN = {
    "attention": [False],
    "everywhere": [False, False],
    "in one layer": [True, False, True],
    "checkpointed": [False, False],
    "module": [False, False],
    "weights": [],
}


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", MODELS)
def test_the_mask_is_that_of_one_device(pools, name, seq, door):
    for errors, same_state, rewritten in pools[2].run(
        run_dropout, name, seq, 2, door, timeout=90
    ):
        assert max(errors) < 1e-5
        assert same_state
        assert rewritten == REWRITTEN[name]


@pytest.mark.slow
def test_on_three_ranks(pools):
    for errors, same_state, _ in pools[3].run(
        run_dropout, "everywhere", 16, 3, "plain", timeout=90
    ):
        assert max(errors) < 1e-5 and same_state


def run_ranks_agree() -> list[float]:
    """Inductor draws other numbers than one process, but the same on every rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS["everywhere"]().train(), sequence_mesh(2)
    tokens = torch.randint(0, 50, (2, 16))
    options = {"strict": False, "mesh": mesh, "shard": {"tokens": 1}}
    step = torch.compile(model, backend="cp", options=options)
    *found, _ = train(step, model, tokens)
    return [x.double().sum().item() for x in found]


@pytest.mark.slow
def test_ranks_agree_with_inductor(pools):
    first, second = pools[2].run(run_ranks_agree, timeout=120)
    assert first == second


def run_without_training() -> tuple[float, list[bool]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = MODELS["everywhere"]().eval(), sequence_mesh(2)
    tokens = torch.randint(0, 50, (2, 16))
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    step = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        error = relative_error(step(tokens), model(tokens))
    return error, [c.plan is not None for c in reports[0].calls]


def test_nothing_is_gathered_in_evaluation(pools):
    for error, rewritten in pools[2].run(run_without_training, timeout=60):
        assert error < 1e-5 and rewritten == [True, True]


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
