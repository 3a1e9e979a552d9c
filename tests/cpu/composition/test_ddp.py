"""DistributedDataParallel with several buckets of gradients, in each of its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.composition.training import (
    GPT,
    HEADS,
    LAYERS,
    WIDTH,
    Attention,
    Trained,
    batches,
    compare,
    in_one_process,
    local_rows,
    loss_of,
    loss_of_local_tokens,
    mean_over,
    new_gpt,
    train,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check

TOKENS = 17
MANY_BUCKETS = 0.004  # megabytes: of the 34 KB of gradients


class MaskedAttention(Attention):
    """Its mask is a buffer, which DDP broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A GPT whose last layer the second step leaves out, and that may checkpoint."""

    def __init__(self, skips: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.gpt: GPT = new_gpt()
        for layer in self.gpt.layers:
            attention = MaskedAttention().double()
            attention.load_state_dict(layer.attention.state_dict(), strict=False)
            layer.attention = attention
        self.skips, self.reentrant = skips, reentrant

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.gpt.embedding(tokens)
        for layer in self.gpt.layers[: 1 if self.skips and step == 1 else None]:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.gpt.head(self.gpt.norm(x))


def parts_of(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """A batch cut into `count` parts, whose gradients are accumulated."""
    return list(zip(*(x.chunk(count) for x in batch), strict=True))


def trained(
    model: nn.Module,
    call: Callable[[Tensor, int], Tensor],
    count: int,
    dp: dist.ProcessGroup | None = None,
) -> Trained:
    calls, ddp = 0, isinstance(model, DistributedDataParallel)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        step, part = divmod(calls, count)
        calls += 1
        # With a static graph DDP refuses to wait in its first backward.
        waits = part < count - 1 and ddp and not (step == 0 and model.static_graph)
        with model.no_sync() if waits else contextlib.nullcontext():
            return loss_of(call(tokens, step), labels)

    def steps() -> Iterator[list[tuple[Tensor, ...]]]:
        for batch in batches(TOKENS):
            local = batch if dp is None else tuple(local_rows(x, dp) for x in batch)
            yield parts_of(local, count)

    return train(model, steps(), loss, (lambda x: x) if dp is None else mean_over(dp))


@dataclass(frozen=True)
class Case:
    """How a model is compiled, wrapped and trained.

    over: the axes of DDP. modes: arguments of DDP. parts: of a batch, whose gradients
    are accumulated. skips, reentrant: of the model. ignored: parameters that are none
    of DDP's.
    """

    order: str = "compiled ddp"
    over: str = "cp"
    modes: dict[str, Any] = field(default_factory=dict)
    parts: int = 1
    skips: bool = False
    reentrant: bool | None = None
    ignored: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return 2 if self.over == "cp" else 4

    @property
    def calls(self) -> list[int]:
        """The attention calls of each graph that runs, where the model is one graph."""
        layers = [LAYERS, LAYERS - self.skips, LAYERS]
        return [count for count in layers for _ in range(self.parts)]


def wrapped(
    case: Case, model: nn.Module, mesh: DeviceMesh
) -> tuple[DistributedDataParallel, Callable[[Tensor, int], Tensor]]:
    options = {"mesh": mesh, "inner": "aot_eager"}
    if case.order == "ddp of compiled":
        model.compile(backend="cp", options=options)
    if case.order == "ddp of compiled blocks":
        for layer in model.gpt.layers:
            layer.compile(backend="cp", options=options)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, case.ignored)
    axes = mesh["dp", "cp"]._flatten("dp_cp") if case.over == "dp_cp" else None
    group = (axes or mesh[case.over]).get_group()
    modes = {"bucket_cap_mb": MANY_BUCKETS} | case.modes
    ddp = DistributedDataParallel(model, process_group=group, **modes)
    if case.order == "compiled ddp":
        return ddp, torch.compile(ddp, backend="cp", options=options)
    return ddp, ddp


FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEWS = {"gradient_as_bucket_view": True}
ONE_BUCKET = {"bucket_cap_mb": 25}
BLOCKS = "ddp of compiled blocks"
CASES = {
    "compiled ddp": Case(),
    "one bucket": Case(modes=ONE_BUCKET),
    "dp and cp": Case(over="dp_cp"),
    "dp": Case(over="dp"),
    "unused": Case(modes=FIND, skips=True),
    "unused, views, no sync": Case(
        over="dp_cp", modes=FIND | VIEWS, parts=2, skips=True
    ),
    "static, no sync": Case(modes=STATIC, parts=2),
    "checkpointed": Case(reentrant=False),
    "ignored": Case(ignored=("gpt.head.weight", "gpt.layers.0.up.weight")),
    "ddp of compiled": Case("ddp of compiled"),
    "ddp of compiled, dp and cp": Case("ddp of compiled", "dp_cp"),
    "ddp of compiled, unused, no sync": Case(
        "ddp of compiled", modes=FIND, parts=2, skips=True
    ),
    "ddp of compiled, static, views": Case("ddp of compiled", modes=STATIC | VIEWS),
    "blocks": Case(BLOCKS),
    "blocks, reentrant": Case(BLOCKS, modes=STATIC, reentrant=True),
    "blocks, reentrant, dp and cp": Case(BLOCKS, "dp_cp", STATIC, 2, reentrant=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@on_ranks(lambda case: case.ranks)
def test_gradients_equal_those_of_one_process(case: Case) -> None:
    shape = (case.ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    ddp, call = wrapped(case, Model(case.skips, case.reentrant), mesh)
    sent: set[int] = set()

    def send(group, bucket):  # DDP refuses annotations that are text
        sent.add(bucket.index())
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(ddp.process_group, send)
    with recording() as reports:
        result = trained(ddp, call, case.parts, mesh["dp"].get_group())
    alone = Model(case.skips)
    deviations = compare(result, trained(alone, alone, case.parts))
    calls = [len(report.calls) for report in reports]
    buckets = len(sent)
    check(deviations)
    assert (buckets == 1) == (case.modes == ONE_BUCKET)
    if case.order != BLOCKS:
        assert calls == case.calls


@pytest.mark.parametrize("local", [False, True], ids=["whole", "blocks"])
@on_ranks(2)
def test_when_gradients_are_sent(local):
    """A whole graph sends when its backward has ended, local blocks beside it.

    The latter is what a warning about the former advises.
    """
    warn_once.cache_clear()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, options = new_gpt(), {"inner": "aot_eager", "strategy": "ring"}
    if local:
        style = cp.ContextParallel(options=options, fullgraph=True)
        for layer in model.layers:
            parallelize_module(layer, mesh, style)
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
    events: list[str] = []

    def send(group, bucket):  # DDP refuses annotations that are text
        events.append("send")
        return allreduce_hook(group, bucket)

    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        out.grad_fn.register_hook(lambda *_: events.append("backward"))

    ddp.register_comm_hook(dist.group.WORLD, send)
    call = ddp
    for module in model.layers if local else [ddp]:
        module.register_forward_hook(watch)
    if not local:
        call = torch.compile(ddp, backend="cp", options=options | {"mesh": mesh})
    of_local = loss_of_local_tokens(ddp, mesh)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        events.clear()
        return of_local(tokens, labels) if local else loss_of(call(tokens), labels)

    with warnings() as texts:
        steps = ([batch] for batch in batches(TOKENS))
        result = train(model, steps, loss, mean_over(mesh.get_group()))
    check(compare(result, in_one_process(TOKENS)))
    told = [x for x in texts if "DDP" in x]
    if local:
        last = len(events) - events[::-1].index("backward")
        assert events[:last].count("send") > 0
        assert told == []
    else:
        assert events == ["backward", *["send"] * 8]
        (text,) = told
        assert "DDP sums 0.0416 MB of gradients over 2 ranks when the backward" in text
        assert "cp.ContextParallel()" in text
