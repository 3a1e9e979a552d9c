"""Losses of a sequence that the ranks divide, or not, equal those of one process."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import attend

CLASSES, WIDTH = 9, 8
POSITIVE = torch.linspace(0.5, 2.0, WIDTH)
WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)


def weights(x):
    """One per token and channel, and none of them like another."""
    count = x.shape[1] * WIDTH
    return torch.linspace(0.1, 2.0, count, dtype=x.dtype).view(1, -1, WIDTH)


def chances(x):
    return x.sigmoid() * 0.98 + 0.01


def log_chances(logits):
    return logits.log_softmax(-1)


# Of activations [B, S, WIDTH], a target of that shape, logits, and labels. A loss of
# elements is arithmetic and a mean: of these one each, and the ways to weigh.
LOSSES = {
    "mse": lambda x, y, *_: F.mse_loss(x, y) + F.mse_loss(y, x, reduction="sum"),
    "mse weighted": lambda x, y, *_: F.mse_loss(x, y, weight=weights(x).expand_as(x)),
    "mse none turned": lambda x, y, *_: (
        F.mse_loss(x.transpose(1, 2), y.transpose(1, 2), reduction="none")
        .transpose(1, 2)
        .view(-1, WIDTH)
        .square()
        .mean(0)
        .sin()
        .sum()
    ),
    "l1 weighted": lambda x, y, *_: F.l1_loss(x, y, weight=weights(x).expand_as(x)),
    "smooth flattened": lambda x, y, *_: F.smooth_l1_loss(
        x.flatten(0, 1), y.flatten(0, 1), beta=0.3
    ),
    "huber weighted": lambda x, y, *_: F.huber_loss(
        x, y, delta=0.4, weight=weights(x).expand_as(x)
    ),
    "divergence flattened": lambda x, y, *_: F.kl_div(
        log_chances(x).flatten(0, 1),
        y.softmax(-1).flatten(0, 1),
        reduction="batchmean",
    ),
    "divergence of logs": lambda x, y, *_: F.kl_div(
        log_chances(x), log_chances(y), log_target=True
    ),
    "binary weighted": lambda x, y, *_: F.binary_cross_entropy(
        chances(x), chances(y).detach(), weights(x)[..., :1]
    ),
    "binary logits": lambda x, y, *_: F.binary_cross_entropy_with_logits(
        x, chances(y), weights(x), pos_weight=POSITIVE.to(x.dtype)
    ),
    "triplet": lambda x, y, *_: F.triplet_margin_loss(
        x, x.roll(1, 1), y, swap=True, reduction="sum"
    ),
    "likelihood": lambda x, y, z, t: F.nll_loss(
        log_chances(z).flatten(0, 1), t.flatten(), ignore_index=2
    ),
    "likelihood weighted": lambda x, y, z, t: F.nll_loss(
        log_chances(z).transpose(1, 2), t, WEIGHTS.to(z.dtype)
    ),
    "likelihood none": lambda x, y, z, t: (
        F.nll_loss(log_chances(z).transpose(1, 2), t, reduction="none").square().mean()
    ),
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


# Each third, in programs of their own.
NAMES = {str(i): list(LOSSES)[i::3] for i in range(3)} | {"l1": ["l1 weighted"]}
# Tokens, ranks, whether the target is the model's, and options. 4 tokens leave the last
# of 3 ranks none; a target from outside is an input whose gradient is needed.
SETTINGS = {
    "uneven": (17, 2, False, {}),
    "on three ranks": (17, 3, False, {}),
    "of the model": (4, 3, True, {}),
    "zigzag": (19, 2, True, {"layout": "zigzag"}),
    "inductor": (17, 2, False, {"inner": "inductor"}),
}


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        *((part, x) for x in SETTINGS if x != "inductor" for part in "012"),
        ("l1", "inductor"),
    ],
)
@on_ranks(lambda setting: SETTINGS[setting][1])
def test_losses(part, setting):
    seq, world, own_target, options = SETTINGS[setting]
    torch.manual_seed(0)
    model = Model(NAMES[part], own_target).double()
    x, target = torch.randn(2, 2, seq, WIDTH, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (2, seq))
    options = {"strategy": "ring", "layout": "contiguous"} | options
    with cp.config.patch(hardware="cpu"):
        inputs = (x, target.requires_grad_(), labels)
        found = compare_calls(model, [inputs], world, shard={"x": 1}, **options)
    found.check()
    assert found.warnings == []
    (report,) = found.reports
    assert report.gathered == () and not report.relayouts_left
