"""A small GPT and its training, in one process and as a wrapper of torch trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from tests.support.bounds import Deviation, deviation, deviations, whole

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 16, 4, 2
STEPS, BATCH = 3, 4
LEARNING_RATE, EPSILON = 1e-2, 1e-8  # of AdamW


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        q, k, v = (
            w(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of tokens; the loss is computed outside, as trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def new_gpt(tied: bool = False) -> GPT:
    """In float64, so that no difference hides in roundings."""
    torch.manual_seed(0)
    model = GPT().double()
    if tied:
        model.head.weight = model.embedding.weight
    return model


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, labels), [BATCH, tokens] each, of every step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, tokens + 1), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass
class Trained:
    """Of STEPS steps of AdamW: losses, gradient norms, and tensors by clean names.

    gradients: of the first step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    parts: Iterator[list[tuple[Tensor, Tensor]]],
    loss: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor], Tensor] = lambda x: x,
    max_norm: float = 1e9,
) -> Trained:
    """Train on the parts of each step, whose gradients are accumulated.

    mean: of losses of several ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, eps=EPSILON)
    done = Trained()
    for step in parts:
        total = 0.0
        for tokens, labels in step:
            part = loss(tokens, labels) / len(step)
            part.backward()
            total += mean(part.detach()).item()
        done.losses.append(total)
        done.norms.append(clip(model, max_norm))
        if not done.gradients:
            done.gradients = {
                clean(n): whole(p.grad).clone() for n, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    done.weights = {clean(n): whole(p) for n, p in model.named_parameters()}
    return done


def clip(model: nn.Module, max_norm: float) -> float:
    """Clip as torch does, with the parameters of each mesh apart; the whole norm."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for x in model.parameters():
        kinds.setdefault(getattr(x, "device_mesh", None), []).append(x)
    grads = ([x.grad for x in each if x.grad is not None] for each in kinds.values())
    norms = [whole(nn.utils.get_total_norm(each)) for each in grads]
    norm = nn.utils.get_total_norm(norms)
    for each in kinds.values():
        nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return norm.item()


def in_one_process(tokens: int, max_norm: float = 1e9, tied: bool = False) -> Trained:
    """What training is to give, whatever it runs on."""
    model = new_gpt(tied)
    steps = ([batch] for batch in batches(tokens))
    return train(model, steps, lambda t, y: loss_of(model(t), y), max_norm=max_norm)


def clean(name: str) -> str:
    """The name of a parameter without what wrappers put in."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def compare(got: Trained, exact: Trained) -> list[Deviation]:
    """All of it; weights are off by a gradient's error over AdamW's epsilon at most."""
    found = deviations(
        {f"grad of {n}": x for n, x in got.gradients.items()},
        {f"grad of {n}": x for n, x in exact.gradients.items()},
    )
    scale = max(x.bound for x in found)
    limit = STEPS * LEARNING_RATE * scale / EPSILON
    assert got.weights.keys() == exact.weights.keys()
    for name, x in exact.weights.items():
        found.append(deviation(f"weight {name}", got.weights[name], x, limit=limit))
    for what in ("losses", "norms"):
        pair = (
            torch.tensor(getattr(each, what), dtype=torch.float64)
            for each in (got, exact)
        )
        # From the second step on they have the error of the weights.
        found.append(deviation(what, *pair, limit=limit * WIDTH))
    return found


def rounded_gradients(
    model: nn.Module, tokens: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Of a model in any precision; its loss is computed in float32 at least."""
    logits = model(tokens)
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    loss_of(logits, labels).backward()
    return {clean(n): whole(x.grad) for n, x in model.named_parameters()}


def relative_error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients together."""
    off = torch.stack([(got[n].double() - x).norm() for n, x in exact.items()])
    size = torch.stack([x.norm() for x in exact.values()])
    return float(off.norm() / size.norm())


def shard_blocks(
    model: nn.Module, mesh: DeviceMesh, style: Any, over: DeviceMesh, again: bool
) -> list[torch.Size]:
    """Give blocks a style over cp, and all FSDP2; return what shapes the blocks give.

    again: whether blocks are checkpoints.
    """
    shapes: list[torch.Size] = []
    for i, block in enumerate(model.layers):
        parallelize_module(block, mesh["cp"], style)
        if again:
            block = model.layers[i] = wrapper.checkpoint_wrapper(block)
        fully_shard(block, mesh=over)
        block.register_forward_hook(lambda *given: shapes.append(given[2].shape))
    fully_shard(model, mesh=over)
    return shapes


def loss_of_local_tokens(
    model: nn.Module, mesh: DeviceMesh, layout: str = "contiguous"
) -> Callable[[Tensor, Tensor], Tensor]:
    """This rank's loss, of its tokens; FSDP2 and DDP take the mean over dp and cp."""

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        local = cp.shard_batch({"ids": ids, "labels": labels}, mesh, layout=layout)
        logits = model(local["ids"]).flatten(0, 1)
        summed = F.cross_entropy(logits, local["labels"].flatten(), reduction="sum")
        return summed * mesh["cp"].size() / labels.numel()

    return loss


def local_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of a batch that a data-parallel group shares out."""
    return x.chunk(group.size())[group.rank()]


def mean_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The mean of a tensor over the ranks of a group."""

    def mean(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    return mean
