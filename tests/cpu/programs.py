"""Programs around attention, and a step of each against one process."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, deviations, in_one_process, step

WIDTH, HEADS = 32, 4


def attend(x: Tensor) -> Tensor:
    """[B, S, C] -> [B, S, C], causal."""
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.transpose(1, 2).flatten(2)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(attend(self.linear(self.embedding(tokens))))

    def after(self, x: Tensor) -> Tensor:
        return x.square().mean()


class InPlace(Base):
    def after(self, x):
        x = x + 1
        x[:, 0] = 0.5
        x.add_(1.0)
        x *= 2
        x.masked_fill_(x > 3, 3.0)
        index = torch.zeros(x.shape[0], 1, WIDTH, dtype=torch.long)
        x = x.clone().scatter_(1, index, 7.0)
        return F.relu(x * 1.0, inplace=True).square().mean()


class NoRule(Base):
    """Operators without a sharding rule, forward or backward."""

    def after(self, x):
        return (torch.cummax(x, 1)[0] + torch.cumsum(x, 1).logcumsumexp(1)).mean()


class Losses(Base):
    """Means whose parts weigh differently on each rank."""

    def after(self, x):
        target = torch.arange(x.shape[0] * x.shape[1]) % WIDTH
        target[: x.shape[1] // 2] = 3
        weight = torch.linspace(0.1, 2.0, WIDTH)
        flat = x.reshape(-1, WIDTH)
        losses = [
            F.cross_entropy(flat, target, ignore_index=3),
            F.cross_entropy(flat, target, weight=weight, ignore_index=3),
            F.cross_entropy(flat, target, weight=weight, label_smoothing=0.1),
            F.cross_entropy(flat, target, reduction="sum") / 100,
            F.cross_entropy(flat, target, reduction="none").square().mean(),
            F.cross_entropy(x.transpose(1, 2), target.view(x.shape[:2])),
            F.cross_entropy(x, torch.softmax(x.detach().flip(-1), -1)),
            F.mse_loss(x, x.detach().roll(1, -1) * 0.5),
            x.mean(axis=1).cos().sum() + torch.mean(x, axis=-1).sin().sum(),
            x.mean(1).square().sum() + x.mean((0, 1)).abs().sum() + x.std(),
        ]
        return sum(losses)


class ModuleEncoder(Base):
    """nn.TransformerEncoder reaches the backend as opaque attention nodes."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 48, dropout=0.0, batch_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.batch_first = batch_first

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return (y * torch.linspace(-1, 1, WIDTH)).sin().mean()


class SequenceFirst(ModuleEncoder):
    def __init__(self) -> None:
        super().__init__(batch_first=False)


class ClassToken(Base):
    """The sequence grows by one in the model, and one token is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, tokens):
        x = self.linear(self.embedding(tokens))
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return attend(x)[:, 0].square().mean()


class Breaks(Base):
    def forward(self, tokens):
        x = self.linear(self.embedding(tokens))
        x = x + attend(x)
        torch._dynamo.graph_break()
        return attend(self.linear(x)).square().mean()


class Autocast(Base):
    def forward(self, tokens):
        dtype = self.linear.weight.dtype
        with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
            x = self.linear(self.embedding(tokens))
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            # q is float32, as after rotary embeddings; autocast makes it bfloat16
            y = F.scaled_dot_product_attention(q.to(dtype), q, q, is_causal=True)
            x = y.transpose(1, 2).flatten(2)
        return x.to(dtype).square().mean()


PROGRAMS = {
    cls.__name__: cls
    for cls in (
        Base, InPlace, NoRule, Losses, ModuleEncoder, SequenceFirst, ClassToken, Breaks,
        Autocast,
    )
}  # fmt: skip


def run_program(
    make: Callable[[], Base],
    seq: int,
    world: int,
    door: str,
    layout: str = "auto",
) -> tuple[list[Deviation], list[int]]:
    """Deviations of loss and gradients, and the rewritten calls of each graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    tokens = torch.randint(0, 50, (2, seq))

    def alone(model: nn.Module) -> Values:
        return step(model, model, tokens)

    values = in_one_process(alone, model)
    options = {"inner": "aot_eager", "layout": layout}
    mesh = sequence_mesh(world)
    given = cp.shard(tokens, mesh, 1)
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
        given = tokens
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        got = step(compiled, model, given)
    found = deviations(got, *values)
    return found, [sum(c.plan is not None for c in r.calls) for r in reports]
