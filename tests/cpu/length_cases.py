"""Models that are called with several lengths, and what one compiled program gives.

The reference is the same call in one process in float64, and how exact it is in
float32; see Note [Derived bounds] in tests/support/bounds.py. Programs are counted by
the reports of the graphs that ran: each compiled graph has its own.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import PROGRAMS, Base
from tests.cpu.routed_models import ROUTED
from tests.models.families.small_gpt import SmallGPT
from tests.support import bounds
from tests.support.bounds import Values, deviations

VOCABULARY = 50


class Attention(nn.Module):
    """Nothing but the call, on [B, H, S, D].

    No other size is ever as long as a chunk: to Dynamo equal sizes are one symbol.
    """

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class HalfTheKeys(Base):
    """Attention over a length that depends on the one of the sequence."""

    def after(self, x):
        half = x.unsqueeze(1)[:, :, : x.shape[1] // 2]
        return F.scaled_dot_product_attention(x.unsqueeze(1), half, half).sum()


class Window(Base):
    """A mask whose size is the length."""

    def after(self, x):
        rows = torch.arange(x.shape[1])[:, None]
        columns = torch.arange(x.shape[1])
        mask = (columns <= rows) & (columns > rows - 4)
        mask = mask.expand(x.shape[0], 1, -1, x.shape[1])
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()


class Padded(Base):
    """A causal mask that hides tokens as well."""

    def forward(self, tokens):
        x = self.linear(self.embedding(tokens)).unsqueeze(1)
        rows = torch.arange(tokens.shape[1])
        visible = (tokens > 9) | (rows == 0)
        mask = (rows <= rows[:, None]) & visible[:, None, None, :]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum()


class Masked(Base):
    """A mask that is an input, which nothing shards."""

    def forward(self, tokens, visible):
        x = self.linear(self.embedding(tokens)).unsqueeze(1)
        rows = torch.arange(tokens.shape[1])
        mask = (rows <= rows[:, None]) & visible[:, None, None, rows]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum()


class Shifted(Base):
    """All tokens but the last, and but the first: shards of unequal sizes."""

    def after(self, x):
        return (x[:, :-1] * x[:, 1:]).sin().sum()


class OneToken(Base):
    """A view with a symbolic stride and without a symbolic size."""

    def after(self, x):
        return x[:, -1].square().mean()


class Pooled(Base):
    """Maxima, weights and products over the tokens, and their number."""

    def after(self, x):
        weights = x[..., :1].softmax(1)
        products = x.transpose(1, 2) @ x / x.shape[1]
        pooled = (weights * x).sum(1) + x.amax(1) + x.sum(1) / x.shape[1]
        return pooled.square().sum() + products.square().sum()


class Normed(nn.Module):
    """Floats that Dynamo takes for symbols, and a width that a weight fixes."""

    def __init__(self):
        super().__init__()
        self.linear, self.eps, self.scale = nn.Linear(24, 24), 1e-5, 0.3

    def forward(self, x):
        x = self.linear(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        q = x.unflatten(-1, (3, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True) * self.scale


class NormedRegion(Normed):
    """Those floats inside of a checkpoint region."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Written(Base):
    """Keys that are written part by part, one of them for all heads, as DeepSeek's."""

    def after(self, x):
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        k = torch.empty_like(q)
        k[..., :5].copy_(q[..., :5])
        k[..., 5:].copy_(q[:, :1, :, 5:])
        return F.scaled_dot_product_attention(q, k, q, is_causal=True).square().sum()


class Convolved(Base):
    """Short causal convolutions, padded in front or cut after, and one that is not."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(32, 1, 3) / 2)

    def after(self, x):
        x = x.mT
        x = F.conv1d(x, self.taps, padding=2, groups=32)[:, :, : x.shape[2]].sin()
        x = F.conv1d(F.pad(x, (2, 0)), self.taps, groups=32).sin()
        return F.conv1d(x, self.taps, padding="same", groups=32).square().sum()


class Encoder(Base):
    """Every token sees every other, in a checkpoint region; then their average."""

    def after(self, x):
        x = checkpoint(self._layer, x, use_reentrant=False)
        return x.mean(1).square().sum()

    def _layer(self, x):
        y = x.unsqueeze(1)
        # Dropout of almost nothing takes the way of dropout, and drops nothing.
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=1e-12).squeeze(1)
        return F.layer_norm(x + y, x.shape[-1:]) * x.std(-1, keepdim=True)


class Cross(Base):
    """Every token sees nine values that are no part of the sequence."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 9, 32))

    def after(self, x):
        memory = self.memory.expand(x.shape[0], -1, -1).unsqueeze(1)
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, memory, memory).square().sum()


class Capped(Base):
    """Scores that a softcap bounds, and dropout of their weights in the backward."""

    def after(self, x):
        x = x.unsqueeze(1)
        scores = torch.tanh(x @ x.mT * 0.3 / 5.0) * 5.0
        rows = torch.arange(x.shape[-2])
        hidden = rows > rows[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ x).square().sum()


class Documents(Base):
    """Packed documents of eight tokens each, in both directions."""

    def after(self, x):
        document = torch.arange(x.shape[1]) // 8
        mask = document == document[:, None]
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum()


def small_gpt() -> nn.Module:
    return SmallGPT(vocabulary=VOCABULARY, context=512, layers=1)


MODELS = {"attention": Attention, "small_gpt": small_gpt}
MODELS |= {"half": HalfTheKeys, "shifted": Shifted, "one_token": OneToken}
MODELS |= {"normed": Normed, "window": Window, "padded": Padded, "masked": Masked}
MODELS |= {"dropping": Encoder, "documents": Documents, "capped": Capped}
MODELS |= {"cross": Cross, "written": Written}
MODELS |= {"normed_region": NormedRegion, "pooled": Pooled, "convolved": Convolved}
MODELS |= {name: PROGRAMS[name] for name in ("InPlace", "ModuleEncoder", "NoRule")}
MODELS |= ROUTED


def inputs_of(name: str, seq: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    if name == "attention":
        return {
            key: torch.randn(2, 4, seq, 8, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
            for key in "qkv"
        }
    if name.startswith("normed"):
        x = torch.randn(2, seq, 24, generator=generator, dtype=torch.float64)
        return {"x": x.to(dtype).requires_grad_()}
    tokens = torch.randint(0, VOCABULARY, (2, seq), generator=generator)
    if name == "masked":
        return {"tokens": tokens, "visible": (tokens > 9) | (torch.arange(seq) == 0)}
    if name != "small_gpt":
        return {"tokens": tokens}
    labels = tokens.clone()
    labels[0, : seq // 3] = -100  # the ranks have unevenly many labels
    return {"tokens": tokens, "labels": labels}


def results(model: nn.Module, call, inputs) -> Values:
    """What the call returns, and all gradients of a sum of it."""
    model.zero_grad()
    returned = call(**inputs)
    returned = list(returned) if isinstance(returned, tuple) else [returned]
    loss = returned[-1]
    loss.backward() if loss.ndim == 0 else loss.sin().sum().backward()
    leaves = dict(model.named_parameters()) | inputs
    found = {f"result {i}": x.detach() for i, x in enumerate(returned)}
    gradients = {k: x.grad for k, x in leaves.items() if x.requires_grad}
    return found | {f"grad of {k}": x for k, x in gradients.items() if x is not None}


def run(name, door, inner, dynamic, lengths, marked=False, **options) -> list[tuple]:
    """For every length: number of the program, its strategy, deviations."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    model = MODELS[name]()
    exact, rough = copy.deepcopy(model).double(), copy.deepcopy(model)
    dim = 2 if name == "attention" else 1
    options |= {"inner": inner}
    if door == "plain":
        shard = dict.fromkeys(inputs_of(name, 8, torch.float32), dim)
        shard.pop("visible", None)
        options |= {"mesh": mesh, "shard": shard}
    step = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    programs, found = [], []
    for seq in lengths:
        wanted = [
            results(x, x, inputs_of(name, seq, dtype))
            for x, dtype in ((exact, torch.float64), (rough, torch.float32))
        ]
        inputs = inputs_of(name, seq, torch.float32)
        if door == "dtensor":
            inputs = {
                key: cp.shard(x.detach(), mesh, dim).requires_grad_(x.requires_grad)
                for key, x in inputs.items()
            }
        for x in inputs.values() if marked else ():
            torch._dynamo.mark_dynamic(x, dim)
        with recording() as reports:
            got = results(model, step, inputs)
        (report,) = reports
        if report not in programs:
            programs.append(report)
        strategy = report.calls[0].plan.strategy.value
        number = programs.index(report)
        found.append((number, strategy, deviations(got, *wanted)))
    return found


def check(answers, programs) -> None:
    for found in answers:
        assert [number for number, _, _ in found] == programs, found
        for _, _, each in found:
            bounds.check(each)
