"""Losses of a sequence that the ranks divide, or not, equal those of one process."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from cpcompile import logs
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import attend
from tests.support.bounds import check, deviations, in_one_process

CLASSES, WIDTH = 9, 8
POSITIVE = torch.linspace(0.5, 2.0, WIDTH)
WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)


MODULES = {
    "mse": nn.MSELoss(),
    "mse sum": nn.MSELoss(reduction="sum"),
    "l1": nn.L1Loss(reduction="sum"),
    "huber": nn.HuberLoss(),
    "divergence": nn.KLDivLoss(reduction="batchmean"),
}


def weights(x):
    """One per token and channel, and none of them like another."""
    count = x.shape[1] * WIDTH
    return torch.linspace(0.1, 2.0, count, dtype=x.dtype).view(1, -1, WIDTH)


def chances(x):
    return x.sigmoid() * 0.98 + 0.01


def log_chances(logits):
    return logits.log_softmax(-1)


# Of activations [B, S, WIDTH], a target of that shape, logits, and labels.
LOSSES = {
    "mse": lambda x, y, *_: F.mse_loss(x, y),
    "mse module": lambda x, y, *_: (
        MODULES["mse"](x, y) + MODULES["mse sum"](y, x)
    ),
    "mse weighted": lambda x, y, *_: F.mse_loss(x, y, weight=weights(x).expand_as(x)),
    "mse none": lambda x, y, *_: (
        F.mse_loss(x, y, reduction="none").mul(weights(x)).sum()
    ),
    "mse none turned": lambda x, y, *_: (
        F.mse_loss(x.transpose(1, 2), y.transpose(1, 2), reduction="none")
        .transpose(1, 2)
        .view(-1, WIDTH)
        .square()
        .mean(0)
        .sin()
        .sum()
    ),
    "l1": lambda x, y, *_: F.l1_loss(x, y) + F.l1_loss(x, y, reduction="sum"),
    "l1 weighted": lambda x, y, *_: F.l1_loss(x, y, weight=weights(x).expand_as(x)),
    "l1 module": lambda x, y, *_: MODULES["l1"](x, y),
    "smooth": lambda x, y, *_: F.smooth_l1_loss(x, y, beta=0.3),
    "smooth flattened": lambda x, y, *_: F.smooth_l1_loss(
        x.flatten(0, 1), y.flatten(0, 1)
    ),
    "huber": lambda x, y, *_: F.huber_loss(x, y, delta=0.4) + MODULES["huber"](y, x),
    "huber weighted": lambda x, y, *_: F.huber_loss(
        x, y, weight=weights(x).expand_as(x)
    ),
    "divergence": lambda x, y, *_: F.kl_div(
        log_chances(x), y.softmax(-1), reduction="batchmean"
    ),
    "divergence of logs": lambda x, y, *_: F.kl_div(
        log_chances(x), log_chances(y), log_target=True
    ),
    "divergence flattened": lambda x, y, *_: MODULES["divergence"](
        log_chances(x).flatten(0, 1), y.softmax(-1).flatten(0, 1)
    ),
    "binary": lambda x, y, *_: F.binary_cross_entropy(chances(x), chances(y)),
    "binary weighted": lambda x, y, *_: F.binary_cross_entropy(
        chances(x), chances(y).detach(), weights(x)[..., :1]
    ),
    "binary logits": lambda x, y, *_: F.binary_cross_entropy_with_logits(
        x, chances(y), weights(x), pos_weight=POSITIVE.to(x.dtype)
    ),
    "margin": lambda x, y, *_: F.soft_margin_loss(x, y.detach().sign()),
    "poisson": lambda x, y, *_: F.poisson_nll_loss(x, y.detach().abs()),
    "likelihood": lambda x, y, z, t: F.nll_loss(
        log_chances(z).flatten(0, 1), t.flatten(), ignore_index=2
    ),
    "likelihood weighted": lambda x, y, z, t: F.nll_loss(
        log_chances(z).transpose(1, 2), t, WEIGHTS.to(z.dtype)
    ),
    "likelihood none": lambda x, y, z, t: (
        F.nll_loss(log_chances(z).transpose(1, 2), t, reduction="none").square().mean()
    ),
    "classes": lambda x, y, z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
    "classes of a model": lambda x, y, z, t: F.cross_entropy(
        z.transpose(1, 2), z.detach().sin().softmax(-1).transpose(1, 2)
    ),
    "class chances none": lambda x, y, z, t: F.cross_entropy(
        z.mT, y.sum(-1, True).expand_as(z).mT, reduction="none"
    ).sin().sum(),
}  # fmt: skip


class Model(nn.Module):
    """Attention, some losses, and a target from outside or from the model."""

    def __init__(self, names: list[str], own_target: bool) -> None:
        super().__init__()
        self.names, self.own_target = names, own_target
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head, self.teacher = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, target, labels):
        y = attend(self.inner(x))
        # apart, because of equal values the gradient is the sign of a rounding
        other = (self.teacher(x) if self.own_target else target * 1.5) + 0.37
        logits = self.head(y)
        return [LOSSES[name](y, other, logits, labels) for name in self.names]


def run(names, seq, world, own_target, inner="aot_eager", layout="contiguous"):
    """Deviations of all losses and of the gradients, the report, and warnings."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(names, own_target).double()
    x = torch.randn(2, seq, WIDTH, dtype=torch.float64)
    target = torch.randn_like(x)
    labels = torch.randint(0, CLASSES, (2, seq))

    def step(call, model):
        model.zero_grad()
        leaf = target.to(model.head.weight.dtype).requires_grad_()
        losses = call(x.to(leaf.dtype), leaf, labels)
        sum(x * (i % 7 + 1) for i, x in enumerate(losses)).backward()
        named = {n: p.grad for n, p in model.named_parameters()} | {"target": leaf.grad}
        grads = {f"grad of {n}": g for n, g in named.items() if g is not None}
        results = (x.detach() for x in losses)
        return dict(zip(names, results, strict=True)) | grads

    values = in_one_process(lambda alone: step(alone, alone), model)
    options = {"inner": inner, "mesh": sequence_mesh(world), "shard": {"x": 1}}
    options |= {"strategy": "ring", "layout": layout}
    compiled = torch.compile(model, backend="cp", options=options)
    logs.warn_once.cache_clear()
    with (
        recording() as reports,
        cp.config.patch(hardware="cpu"),
        mock.patch.object(logs.log, "warning") as warning,
    ):
        got = step(compiled, model)
    (report,) = reports
    return deviations(got, *values), report, [str(x) for x in warning.mock_calls]


# Each third, in programs of their own.
NAMES = {str(i): list(LOSSES)[i::3] for i in range(3)}
parts = pytest.mark.parametrize("part", NAMES)


def check_all(pools, part, seq, world, *args):
    names = NAMES.get(part, [part])
    for found, report, warnings in pools[world].run(
        run, names, seq, world, *args, timeout=170
    ):
        check(found)
        assert warnings == []
        assert report.gathered == () and not report.relayouts_left


@parts
@pytest.mark.parametrize("seq", [16, 17], ids=str)
def test_losses(pools, part, seq):
    """On 2 ranks; the target is an input whose gradient is needed."""
    check_all(pools, part, seq, 2, False)


@parts
def test_losses_of_two_values_of_a_model(pools, part):
    """4 tokens on 3 ranks, the last of which has none; the target is sharded."""
    check_all(pools, part, 4, 3, True)


@parts
def test_losses_in_a_layout(pools, part):
    check_all(pools, part, 19, 2, True, "aot_eager", "zigzag")


def test_a_compiled_loss(pools):
    check_all(pools, "l1 weighted", 17, 2, False, "inductor")
