"""Parameters that cp.shard_parameters shards, against one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from tests.cpu.attention_cases import compiled_on
from tests.cpu.composition import training
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import Deviation, check, deviations, whole

MAX_NORM = 0.1  # which clips


def run(shape: tuple[int, int], tokens: int, how: str, inner: str) -> list[Deviation]:
    """Training on dp x cp."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    model = training.new_gpt("tied" in how)
    names = set(model.state_dict())
    if "checkpointed" in how:
        for i, block in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(block)
    axes = "cp" if "cp alone" in how else ("dp", "cp")
    keep = "kept" in how
    cp.shard_parameters(model, mesh, axes=axes, reshard_after_forward=not keep)
    assert {training.clean(n) for n in model.state_dict()} == names
    assert all(isinstance(x, DTensor) for x in model.parameters())
    call = model
    if "blocks" in how:
        for block in model.layers:
            block.compile(backend="cp", options={"mesh": mesh, "inner": inner})
    elif "eager" not in how:
        call = compiled_on(mesh, model, fullgraph=True, inner=inner)
    dp = mesh["dp"].get_group()
    pieces = 2 if "accumulated" in how else 1

    def parts(pair: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        mine = [training.local_rows(x, dp).chunk(pieces) for x in pair]
        return list(zip(*mine, strict=True))

    steps = map(parts, training.batches(tokens))
    loss = lambda t, y: training.loss_of(call(t), y)  # noqa: E731
    got = training.train(model, steps, loss, training.mean_over(dp), MAX_NORM)
    if "tied" in how:
        assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    return training.compare(
        got, training.in_one_process(tokens, MAX_NORM, tied="tied" in how)
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "shape", "tokens", "inner"),
    [
        ("whole", (2, 2), 18, "aot_eager"),
        ("whole", (2, 2), 16, "inductor"),
        ("whole, kept", (2, 2), 16, "aot_eager"),
        ("whole, tied", (2, 2), 16, "aot_eager"),
        ("whole, accumulated", (2, 2), 17, "aot_eager"),
        ("whole, checkpointed", (2, 2), 16, "aot_eager"),
        ("whole, checkpointed", (1, 4), 16, "inductor"),
        ("whole, cp alone", (1, 4), 17, "aot_eager"),
        ("blocks", (2, 2), 16, "aot_eager"),
        ("blocks, checkpointed", (2, 2), 18, "aot_eager"),
        ("eager", (2, 2), 16, "aot_eager"),
    ],
)
@on_ranks(4, timeout=280)
def test_training(how, shape, tokens, inner) -> None:
    check(run(shape, tokens, how, inner))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@on_ranks(3)
def test_rows_that_ranks_do_not_divide(inner) -> None:
    check(run((1, 3), 17, "whole", inner))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@on_ranks(4)
def test_training_in_the_local_view(layout) -> None:
    """Blocks that take and return this rank's tokens."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))
    model = cp.shard_parameters(training.new_gpt(), mesh)
    style = cp.ContextParallel(options={"inner": "aot_eager"})
    for block in model.layers:
        parallelize_module(block, mesh["cp"], style)

    steps = ([batch] for batch in training.batches(17))
    loss = training.loss_of_local_tokens(model, mesh, layout)
    got = training.train(model, steps, loss, training.mean_over(dist.group.WORLD))
    check(training.compare(got, training.in_one_process(17)))


@pytest.mark.parametrize("keep", [False, True])
@on_ranks(4)
def test_all_parameters_travel_together(keep) -> None:
    """They fit into one bucket; the other all-gather brings the logits together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = cp.shard_parameters(
        training.new_gpt(), mesh, reshard_after_forward=not keep
    )
    compiled = torch.compile(model, backend="cp", options={"mesh": mesh})
    tokens, labels = next(training.batches(16))
    training.loss_of(compiled(tokens), labels).backward()
    sent = []
    with torch.profiler.profile() as forward:
        loss = training.loss_of(compiled(tokens), labels)
    with torch.profiler.profile() as backward:
        loss.backward()
    for profile in (forward, backward):
        names = (e.name.removeprefix("_c10d_functional::") for e in profile.events())
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        sent.append(Counter(n for n in names if n.startswith(kinds)))
    forward, backward = sent
    assert sum(n for k, n in forward.items() if "gather" in k) == 2, forward
    gathers = sum(n for k, n in backward.items() if "gather" in k)
    assert gathers == (0 if keep else 1), backward
    assert sum(n for k, n in backward.items() if "scatter" in k) == 1, backward
    assert not any("all_reduce" in k for k in forward + backward)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_what_was_gathered_is_freed(reshard) -> None:
    """Of what is no input a compiled forward keeps little, or the gathered weights."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    cp.shard_parameters(model, mesh, reshard_after_forward=reshard)
    compiled = compiled_on(mesh, model, shard={"input": 1})
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compiled(torch.randn(1, 4, 64))
    local = {x._local_tensor.untyped_storage().data_ptr() for x in model.parameters()}
    size = sum(size for at, size in sizes.items() if at not in local)
    gathered = 4 * 64 * 64 * 4  # the first layer's is not needed
    assert size < gathered / 4 if reshard else size >= gathered * 3 / 4, size


def state() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = cp.shard_parameters(training.new_gpt(), mesh)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def steps_of(model, optimizer, first: int, last: int) -> dict[str, Tensor]:
    compiled = compiled_on(next(model.parameters()).device_mesh, model)
    for tokens, labels in list(training.batches(16))[first:last]:
        training.loss_of(compiled(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(x) for name, x in model.named_parameters()}


def save(folder: str) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and the weights after the third step."""
    model, optimizer = state()
    steps_of(model, optimizer, 0, 2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return steps_of(model, optimizer, 2, 3)


def resume(folder: str) -> dict[str, Tensor]:
    """The weights after the third step, from the checkpoint."""
    model, optimizer = state()
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return steps_of(model, optimizer, 2, 3)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_checkpoint_of_two_ranks_is_resumed_by_others(pools, tmp_path, ranks) -> None:
    wanted, _ = pools[2].run(save, str(tmp_path), timeout=120)
    for got in pools[ranks].run(resume, str(tmp_path), timeout=120):
        check(deviations(got, wanted))
