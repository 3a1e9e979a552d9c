"""Blocks that repeat are compiled once, and compute what each would have computed.

Every kind of model is compared with one process, whose numbers are exact in float64,
and bit by bit with the same program whose blocks are compiled one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, assert_equal, check, deviations

LAYERS, WIDTH, HEADS, TOKENS, WORDS = 4, 16, 4, 24, 32


@dataclass(frozen=True)
class Kind:
    """A model and how it is compiled."""

    strategy: str = "ring"
    layout: str = "contiguous"
    dropout: float = 0.0  # of the perceptron
    attention_dropout: float = 0.0
    tied: bool = False  # the blocks have one set of weights
    checkpointed: bool = False
    counts: bool = False  # a buffer of every block is written
    odd: str = ""  # in which the block in the middle differs
    scale: float = 1.0


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        p = kind.attention_dropout
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + y.transpose(1, 2).flatten(2) * kind.scale
        hidden = F.dropout(F.gelu(self.up(self.norm_2(x))), kind.dropout)
        if kind.odd == "dtype" and kind.scale != 1.0:
            hidden = hidden.float().sin().to(x.dtype)
        elif kind.odd == "dtype":
            hidden = hidden.to(x.dtype).sin().to(x.dtype)
        if kind.counts:
            self.seen.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x + self.down(hidden)


class Model(nn.Module):
    """The mean of squared differences from the tokens that follow."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH)
        kinds = [kind] * LAYERS
        if kind.odd:
            kinds[LAYERS // 2] = replace(kind, scale=0.5)
        self.blocks = nn.ModuleList(map(Block, kinds))
        if kind.tied:
            for block in self.blocks:
                block.down.weight = self.blocks[0].down.weight
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.kind.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Ran:
    """Results of a step and a second one, and the sizes of what was folded."""

    errors: list[Deviation]
    values: Values
    folded: list[int]


def new_model(kind: Kind) -> Model:
    torch.manual_seed(0)
    return Model(kind).double()


def results(call, model: Model) -> Values:
    """Of two steps, the second of which sees the buffers that the first has written."""
    torch.manual_seed(1)
    found = {}
    for step in range(2):
        text = torch.randint(WORDS, (2, TOKENS + 1))
        model.zero_grad()
        loss = call(text[:, :-1], text[:, 1:])
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, x in model.named_parameters():
            found[f"grad of {name}, step {step}"] = x.grad.clone()
        for name, x in model.named_buffers():
            found[f"{name} {step}"] = x.clone()
    return found


def run(kind: Kind, repeat: str | bool, world: int) -> Ran:
    torch._dynamo.reset()
    model = new_model(kind)
    options = {
        "mesh": sequence_mesh(world),
        "strategy": kind.strategy,
        "layout": kind.layout,
        "repeat": repeat,
    }
    compiled = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        got = results(compiled, model)
    alone = new_model(kind)
    random = kind.dropout or kind.attention_dropout
    errors = [] if random else deviations(got, results(alone, alone))
    return Ran(errors, got, [x.count for x in reports[0].folded])


KINDS = {
    "ring-zigzag": Kind(layout="zigzag"),
    "all_gather": Kind("all_gather"),
    "ulysses": Kind("ulysses"),
    "dropout": Kind(dropout=0.3),
    "attention-dropout": Kind(attention_dropout=0.3),
    "tied": Kind(tied=True, layout="zigzag"),
    "checkpointed": Kind(checkpointed=True),
    "counts": Kind("all_gather", counts=True),
}


@pytest.mark.core("ring-zigzag")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_numbers_are_those_of_separate_blocks(pools, kind: Kind) -> None:
    folded = pools[2].run(run, kind, "auto", 2, timeout=300)
    separate = pools[2].run(run, kind, False, 2, timeout=300)
    for one, other in zip(folded, separate, strict=True):
        assert one.folded == [LAYERS, LAYERS]
        assert other.folded == []
        check(one.errors)
        for name, x in other.values.items():
            assert_equal(name, one.values[name], x)
