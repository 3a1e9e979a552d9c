"""FSDP2 and DDP over an axis that shards the sequence: their mean has to be right."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cpcompile.errors import InputError
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.composition.training import (
    batches,
    compare,
    in_one_process,
    local_rows,
    loss_of,
    mean_over,
    new_gpt,
    train,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import Deviation, check, deviations

TOKENS = 17


def wrapped(mesh, how: str, options: dict) -> nn.Module:
    """The model, its blocks compiled, under a wrapper that averages over `mesh`."""
    model = new_gpt()
    options = {"inner": "aot_eager"} | options
    if "ddp" in how:
        for i, block in enumerate(model.layers):
            block.compile(backend="cp", options=options)
            model.layers[i] = checkpoint_wrapper(block)
        return DistributedDataParallel(model)
    for i, block in enumerate(model.layers):
        if "checkpointed" in how:
            block = model.layers[i] = checkpoint_wrapper(block)
        if "compiled first" in how:
            block.compile(backend="cp", options=options)
        if "root" not in how:
            fully_shard(block, mesh=mesh)
        if "compiled first" not in how:
            block.compile(backend="cp", options=options)
    fully_shard(model, mesh=mesh)
    return model


def run(how: str, over: str, grad_sync: str = "auto") -> list[Deviation]:
    shape = (1, 4) if over == "cp" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    reduced = {
        "cp": lambda: mesh["cp"],
        "dp": lambda: mesh["dp"],
        "dp_cp": lambda: mesh["dp", "cp"]._flatten("dp_cp"),
        "dp x cp": lambda: mesh,
    }[over]()
    model = wrapped(reduced, how, {"mesh": mesh, "grad_sync": grad_sync})
    dp = mesh["dp"].get_group()
    steps = ([tuple(local_rows(x, dp) for x in batch)] for batch in batches(TOKENS))
    got = train(model, steps, lambda t, y: loss_of(model(t), y), mean_over(dp))
    return compare(got, in_one_process(TOKENS))


CASES = [
    ("blocks compiled first", "dp_cp"),
    ("blocks", "dp_cp"),
    ("blocks checkpointed", "dp_cp"),
    ("root", "dp_cp"),
    ("blocks", "dp x cp"),
    ("blocks", "cp"),
    ("blocks", "dp"),
    ("ddp of checkpointed blocks", "dp_cp"),
]


@pytest.mark.parametrize(
    ("how", "over", "grad_sync"),
    [
        *((*case, "auto") for case in CASES),
        # Complete gradients have the right mean too; they cost another all-reduce.
        ("blocks", "dp_cp", "reduce"),
    ],
)
@on_ranks(4)
def test_averaging_wrappers(how, over, grad_sync):
    check(run(how, over, grad_sync))


@on_ranks(4)
def test_wrappers_that_sum() -> None:
    """FSDP2 with a divisor of the user's own takes sums, here those of four losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = wrapped(mesh["dp", "cp"]._flatten("dp_cp"), "blocks", {"mesh": mesh})
    for block in model.layers:
        block.set_gradient_divide_factor(1.0)
    model.set_gradient_divide_factor(2.0)  # either cp rank runs its own modules
    dp = mesh["dp"].get_group()
    steps = ([tuple(local_rows(x, dp) for x in batch)] for batch in batches(TOKENS))
    with recording() as reports:
        got = train(model, steps, lambda t, y: loss_of(model(t), y) / 2, mean_over(dp))
    got.losses = [2 * loss for loss in got.losses]
    found = compare(got, in_one_process(TOKENS))
    said = reports[0].edges()
    check(found)
    assert (
        "gradients of 8 parameters: the share of each rank, for FSDP2, which sums "
        "over the ranks [0, 1, 2, 3]"
    ) in said


@pytest.mark.parametrize(
    ("over", "grad_sync", "needed"),
    [
        ("dp_cp", "none", "needed 'average' for gradients over the ranks [0, 1]"),
        ("dp", "average", "needed 'reduce' for gradients over the ranks [0, 1]"),
        ("dp", "none", "needed 'reduce' for gradients over the ranks [0, 1]"),
    ],
)
@on_ranks(4)
def test_contradictions_are_refused(over, grad_sync, needed):
    with pytest.raises(BackendCompilerFailed) as caught:
        run("blocks", over, grad_sync)
    text = str(caught.value)
    assert f"options['grad_sync'] is {grad_sync!r}" in text
    assert "FSDP2, which averages over the ranks" in text
    assert needed in text or torch.distributed.get_rank()


@on_ranks(2)
def test_hooks_that_break_the_graph_are_warned_of():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model, both = new_gpt(), mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.layers:
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both)
    compiled = compiled_on(mesh, model)
    steps = ([batch] for batch in batches(TOKENS))
    with warnings() as said:
        got = train(model, steps, lambda t, y: loss_of(compiled(t), y))
    check(compare(got, in_one_process(TOKENS)))
    assert len([x for x in said if "FSDP2's hooks break the graph" in x]) == 1


UNWRAPPED = (
    "was compiled while its parameters were managed by DDP",
    "they are managed by no wrapper now",
)


def check_gradients(model: nn.Module) -> None:
    exact = in_one_process(TOKENS).gradients
    got = {f"grad of {n}": p.grad for n, p in model.named_parameters()}
    check(deviations(got, {f"grad of {n}": x for n, x in exact.items()}))


# A mean of complete gradients is right; without gradients nothing can be wrong. In the
# other order gradients would be twice what they are.
@pytest.mark.parametrize(
    ("first_wrapped", "train"),
    [(True, True), (False, True), (True, False)],
    ids=["first", "later", "eval"],
)
@on_ranks(2)
def test_a_program_that_is_unwrapped_later(first_wrapped, train):
    """One program, called under DDP and without it, in either order."""
    model = new_gpt()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    compiled = compiled_on(mesh, model)
    calls = [DistributedDataParallel(compiled), compiled]
    tokens, labels = next(batches(TOKENS))

    def steps() -> None:
        for call in calls if first_wrapped else calls[::-1]:
            with torch.set_grad_enabled(train):
                loss = loss_of(call(tokens), labels)
            if train:
                model.zero_grad()
                loss.backward()

    if first_wrapped and train:
        with pytest.raises(InputError) as caught:
            steps()
        said = (*UNWRAPPED, "call torch.compiler.reset()")
        assert all(x in str(caught.value) for x in said)
    else:
        steps()
        if train:
            check_gradients(model)


@pytest.mark.parametrize("first_wrapped", [True, False])
@on_ranks(2)
def test_a_reentrant_checkpoint_that_is_unwrapped_later(first_wrapped):
    """Its forward runs without gradients, and its program under the backward."""
    model = new_gpt()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    for block in model.layers:
        block.compile(backend="cp", options={"mesh": mesh, "inner": "aot_eager"})
    tokens, labels = next(batches(TOKENS))
    if first_wrapped:
        loss_of(DistributedDataParallel(model)(tokens), labels).backward()
        model.zero_grad()
    x = model.embedding(tokens)
    for block in model.layers:
        x = checkpoint(block, x, use_reentrant=True)
    loss = loss_of(model.head(model.norm(x)), labels)
    if first_wrapped:
        with pytest.raises(InputError) as caught:
            loss.backward()
        assert all(said in str(caught.value) for said in UNWRAPPED)
    else:
        loss.backward()
        check_gradients(model)
