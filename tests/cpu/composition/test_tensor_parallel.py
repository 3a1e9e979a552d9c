"""Models that parallelize_module has made tensor parallel, against one process."""

from __future__ import annotations

import copy
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cpcompile as cp
from tests.cpu.attention_cases import compiled_on
from tests.cpu.composition import training
from tests.cpu.composition.exchanged import Exchanged
from tests.cpu.on_ranks import on_ranks
from tests.golden.pipeline.test_tensor_parallel import TOKENS, WITH_EMBEDDING, Layer
from tests.support.bounds import check, deviations


def parallelized(mesh: DeviceMesh, tokens_too: bool) -> nn.Module:
    """Heads and channels are sharded over tp; tokens too with sequence parallelism."""
    split = Shard(1) if tokens_too else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
    }
    if tokens_too:
        plan["norm"] = SequenceParallel()
    for i in range(training.LAYERS):
        layer = {
            **{f"attention.w{x}": ColwiseParallel() for x in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=split),
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split),
        }
        if tokens_too:
            layer["attention"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            layer |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {f"layers.{i}.{name}": style for name, style in layer.items()}
    return parallelize_module(training.new_gpt(), mesh["tp"], plan)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sharded", "how", "shape", "tokens", "inner"),
    [
        ("tokens", "whole", (1, 2, 2), 18, "aot_eager"),
        ("tokens", "whole, zigzag", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "blocks, zigzag", (1, 2, 2), 16, "aot_eager"),
        ("heads", "whole, zigzag", (1, 2, 2), 17, "aot_eager"),
        ("tokens", "whole", (1, 2, 2), 16, "inductor"),
        ("tokens", "blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "checkpointed blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "fsdp blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "fsdp checkpointed blocks", (2, 2, 1), 16, "aot_eager"),
        ("heads", "whole", (1, 2, 2), 17, "aot_eager"),
        ("heads", "whole", (1, 2, 2), 16, "inductor"),
        ("heads", "whole", (1, 1, 4), 16, "aot_eager"),
    ],
)
@on_ranks(4, timeout=280)
def test_training(sharded, how, shape, tokens, inner) -> None:
    """Training on dp x cp x tp."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    model = parallelized(mesh, sharded == "tokens")
    options = {"mesh": mesh, "inner": inner}
    if "zigzag" in how:
        options |= {"strategy": "ring", "layout": "zigzag"}
    call = model
    if "whole" in how:
        call = compiled_on(mesh, model, fullgraph=True, **options)
    else:
        for i, block in enumerate(model.layers):
            if "checkpointed" in how:
                block = model.layers[i] = checkpoint_wrapper(block)
            block.compile(backend="cp", options=options)
            if "fsdp" in how:
                fully_shard(block, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    if "fsdp" in how:
        fully_shard(model, mesh=mesh["dp_cp"])
    dp = mesh["dp"].get_group()
    steps = (
        [tuple(training.local_rows(x, dp) for x in pair)]
        for pair in training.batches(tokens)
    )
    got = training.train(
        model, steps, lambda t, y: training.loss_of(call(t), y), training.mean_over(dp)
    )
    check(training.compare(got, training.in_one_process(tokens)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tokens", "sharded", "layout", "checkpointed", "inner"),
    [
        (16, "tokens", "zigzag", False, "aot_eager"),
        (16, "tokens", "contiguous", True, "aot_eager"),
        (16, "tokens", "contiguous", False, "aot_eager"),
        (16, "tokens", "zigzag", True, "aot_eager"),
        (16, "tokens", "zigzag", True, "inductor"),
        (17, "heads", "zigzag", False, "aot_eager"),
        (17, "heads", "zigzag", True, "aot_eager"),
        (16, "heads", "striped", False, "aot_eager"),
    ],
)
@on_ranks(4, timeout=280)
def test_training_in_the_local_view(
    tokens, sharded, layout, checkpointed, inner
) -> None:
    """FSDP2 over dp x cp of blocks that are tensor parallel and have local tokens."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model = parallelized(mesh, sharded == "tokens")
    style = cp.ContextParallel(options={"inner": inner, "strategy": "ring"})
    shapes = training.shard_blocks(model, mesh, style, both, checkpointed)

    loss = training.loss_of_local_tokens(model, mesh, layout)
    steps = ([batch] for batch in training.batches(tokens))
    got = training.train(model, steps, loss, training.mean_over(dist.group.WORLD))
    check(training.compare(got, training.in_one_process(tokens)))
    most = max(shape[1] for shape in shapes)
    assert most <= -(-tokens // (4 if sharded == "tokens" else 2))


class Sent(NamedTuple):
    """What a forward and a backward send, by kind."""

    forward: Counter
    backward: Counter


# What two ranks of cp send for attention. A ring's message is one of keys and one of
# values, or of their gradients; the backward of a gather scatters.
ATTENTION = {
    "ring": Sent(Counter(send=2 * training.LAYERS), Counter(send=6 * training.LAYERS)),
    "all_gather": Sent(
        Counter(all_gather=training.LAYERS),
        Counter(all_gather=training.LAYERS, reduce_scatter=training.LAYERS),
    ),
}


def kind(name: str) -> str | None:
    """Of a call or an event; None for one that receives or waits."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send")
    bare = name.replace("_", "")
    return next((x for x in kinds if x.replace("_", "") in bare), None)


def profiled(call, tokens: Tensor, labels: Tensor) -> Sent:
    """By the profiler; what gloo runs has to be what torch has called."""
    with Exchanged("c10d::", "gloo:") as forward:
        loss = training.loss_of(call(tokens), labels)
    with Exchanged("c10d::", "gloo:") as backward:
        loss.backward()
    found = []
    for counts in (forward, backward):
        called, ran = Counter(), Counter()
        for name, count in counts.items():
            (ran if name.startswith("gloo:") else called)[kind(name)] += count
        del called[None], ran[None]
        found.append(Counter(called))
        called["all_reduce"] += called.pop("reduce_scatter", 0)  # as gloo does it
        assert ran == called, counts
    return Sent(*found)


@pytest.mark.parametrize("sharded", ["tokens", "heads"])
@pytest.mark.parametrize("strategy", ATTENTION)
@on_ranks(4)
def test_what_a_step_sends(sharded, strategy) -> None:
    """What tp sends alone, what attention sends, and sums of gradients.

    The one gather over cp brings the logits together, because the loss is outside. No
    gradient that leaves the graph is a summand.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    batch = next(training.batches(16))
    model = parallelized(mesh, sharded == "tokens")
    alone = profiled(model, *batch)
    placements = [getattr(p.grad, "placements", None) for p in model.parameters()]
    model = parallelized(mesh, sharded == "tokens")
    call = compiled_on(mesh, model, fullgraph=True, strategy=strategy)
    training.loss_of(call(batch[0]), batch[1]).backward()
    ours = profiled(call, *batch)
    parameters = len(placements)
    summands = placements.count((Partial(),))
    assert summands == (
        2 * training.LAYERS + 1 if sharded == "tokens" else 0
    )  # the norms
    more = ATTENTION[strategy]
    sums = Counter(all_reduce=parameters + summands)
    assert ours.forward == alone.forward + more.forward + Counter(all_gather=1)
    assert ours.backward == alone.backward + more.backward + sums


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@on_ranks(4)
def test_returned_chunks_of_tokens_are_those_of_one_process(layout):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = nn.Sequential(nn.Embedding(16, 8), Layer()).double()
    alone, ids = copy.deepcopy(model), torch.randint(16, (2, 8))
    weights = torch.arange(8.0, dtype=torch.float64)
    whole = alone(ids)
    (whole * weights).square().sum().backward()
    exact = {n: p.grad for n, p in alone.named_parameters()}
    exact["result"] = whole.detach().chunk(2, 1)[mesh["tp"].get_local_rank()]
    plan = {f"1.{name}": style for name, style in TOKENS.items()}
    parallelize_module(model, mesh["tp"], plan | {"0": WITH_EMBEDDING["embedding"]})
    options = {"strategy": "ring", "layout": layout, "shard": {"input": 1}}
    result = compiled_on(mesh, model, **options)(ids)
    (result * weights).square().sum().backward()
    got = {"result": result.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            got[name] = grad.full_tensor()
        else:  # of this rank's chunk alone
            dist.all_reduce(grad, group=mesh["tp"].get_group())
            got[name] = grad
    check(deviations(got, exact))
