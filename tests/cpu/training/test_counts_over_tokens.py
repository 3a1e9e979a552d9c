"""Arguments by which a call depends on counts or extremes over all tokens.

A table: each row is a call with one such argument, compared with one process where its
tokens are cut. What DTensor would count on each rank alone is gathered, with a warning,
or computed from sums.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.on_ranks import on_ranks
from tests.support.small_calls import SmallCall, check_calls

GENERATOR = torch.Generator().manual_seed(7)
NUMBERS = torch.randint(3, (2, 7), generator=GENERATOR)
WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def ids(x, count=5):
    return (x.detach()[..., 0] * 3).long().abs() % count


def table(x):
    return torch.linspace(0, 1, 15, dtype=x.dtype).view(5, 3) * x.mean()


def batch_statistics(x):
    mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    y = F.batch_norm(x.mT, mean, var, training=True, momentum=0.3)
    return y, mean, var


def ctc(x, reduction):
    labels = torch.tensor([[1, 2], [2, 1]])
    lengths = torch.tensor([7, 6]), torch.tensor([2, 1])
    scores = x.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, labels, *lengths, reduction=reduction, zero_infinity=True)


LOOK_UPS = {
    "embedding, by frequency": lambda x: (
        x * F.embedding(ids(x), table(x), scale_grad_by_freq=True)
    ),
    "embedding, by frequency, padded": lambda x: (
        x * F.embedding(ids(x), table(x), 2, scale_grad_by_freq=True)
    ),
    "embedding_bag, by frequency": lambda x: F.embedding_bag(
        ids(x), table(x), mode="mean", scale_grad_by_freq=True
    ),
    "embedding_bag, padded": lambda x: F.embedding_bag(
        ids(x), table(x), mode="mean", padding_idx=1
    ),
    "embedding_bag, weighted": lambda x: F.embedding_bag(
        ids(x), table(x), mode="sum", per_sample_weights=x[..., 1]
    ),
    "one_hot": lambda x: F.one_hot(ids(x), 5).sum(1),
}
LOOK_UPS |= {
    f"embedding_bag, {mode}": lambda x, mode=mode: F.embedding_bag(
        ids(x), table(x), mode=mode
    )
    for mode in ("sum", "mean", "max")
}
STATISTICS = {
    "bincount": lambda x: torch.bincount(ids(x).flatten(), minlength=5),
    "bincount, weighted": lambda x: torch.bincount(
        ids(x).flatten(), x[..., 1].detach().flatten(), 5
    ),
    "histc between its extremes": lambda x: torch.histc(x.detach(), 4),
    "batch_norm, statistics": batch_statistics,
    "nanquantile": lambda x: x.nanquantile(WEIGHT / 4, 1),
    "nanmedian": lambda x: x.nanmedian(1)[0] + x.nanmedian(),
    "var, correction": lambda x: x.var(1, correction=0) + x.std((0, 1), correction=2),
    "cov, weighted": lambda x: torch.cov(x[0].T, fweights=torch.arange(1, 8)),
    "renorm": lambda x: torch.renorm(x, 2, 1, 0.5) + torch.renorm(x, 2, 2, 1.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
}
REDUCED_AT = {
    f"scatter_reduce, {how}, include_self={own}": lambda x, how=how, own=own: [
        y.scatter_reduce(
            dim, ids(x, 3)[..., None].expand(-1, -1, 3), x, how, include_self=own
        )
        for dim, y in ((1, x.new_ones(2, 3, 3)), (2, x.cos()))
    ]
    for how in ("sum", "prod", "mean", "amax")
    for own in (True, False)
}
REDUCED_AT |= {
    f"index_reduce, {how}, include_self={own}": lambda x, how=how, own=own: x.new_ones(
        2, 3, 3
    ).index_reduce(1, NUMBERS[0], x, how, include_self=own)
    for how in ("prod", "mean", "amax")
    for own in (True, False)
}
OF_CLASSES = {
    "multi_margin": lambda x, r: F.multi_margin_loss(
        x.flatten(0, 1), NUMBERS.flatten(), weight=WEIGHT, reduction=r
    ),
    "multilabel_margin": lambda x, r: F.multilabel_margin_loss(
        x.flatten(0, 1), NUMBERS.new_tensor([[0, 2, -1]] * 14), reduction=r
    ),
    "nll": lambda x, r: F.nll_loss(
        x.log_softmax(-1).flatten(0, 1),
        NUMBERS.flatten(),
        weight=WEIGHT,
        ignore_index=1,
        reduction=r,
    ),
    "nll of channels": lambda x, r: F.nll_loss(
        x.mT.log_softmax(1), NUMBERS, weight=WEIGHT, reduction=r
    ),
    "cross_entropy, smoothed": lambda x, r: F.cross_entropy(
        x.flatten(0, 1),
        NUMBERS.flatten(),
        weight=WEIGHT,
        ignore_index=2,
        label_smoothing=0.3,
        reduction=r,
    ),
    "ctc": ctc,
}


def by_reduction(losses):
    return {
        f"{name}, {r}": lambda x, loss=loss, r=r: loss(x, r)
        for name, loss in losses.items()
        for r in ("mean", "sum", "none")
    }


KINDS = {
    "look_ups": LOOK_UPS,
    "statistics": STATISTICS,
    "reduced_at": REDUCED_AT,
    "of_classes": by_reduction(OF_CLASSES),
}
KINDS = {
    kind: {name: SmallCall(call) for name, call in calls.items()}
    for kind, calls in KINDS.items()
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "world"), [(0, 2), (1, 2), (1, 3)])
@on_ranks("world", timeout=290)
def test_every_second_call_equals_one_process(first, world, kind):
    check_calls(dict(list(KINDS[kind].items())[first::2]), world)
