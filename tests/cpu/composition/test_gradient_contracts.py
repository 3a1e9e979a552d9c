"""FSDP2 and DDP over an axis that shards the sequence: their mean has to be right."""

from __future__ import annotations

import logging

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
from tests.support.bounds import Deviation, check, deviations

TOKENS = 17


def wrapped(mesh, how: str, options: dict) -> nn.Module:
    """The model, its blocks compiled, under a wrapper that averages over `mesh`."""
    model = new_gpt()
    options = {"inner": "aot_eager"} | options
    if how == "ddp of checkpointed blocks":
        for i, block in enumerate(model.layers):
            block.compile(backend="cp", options=options)
            model.layers[i] = checkpoint_wrapper(block)
        return DistributedDataParallel(model)
    if "ddp" in how:
        if how == "ddp of compiled":
            model.compile(backend="cp", options=options)
            return DistributedDataParallel(model)
        return torch.compile(
            DistributedDataParallel(model), backend="cp", options=options
        )
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
    torch._dynamo.reset()
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
    ("ddp of compiled", "dp_cp"),
    ("compiled ddp", "dp_cp"),
    ("ddp of checkpointed blocks", "dp_cp"),
]


@pytest.mark.parametrize(
    ("how", "over"), CASES, ids=[f"{how}-{over}" for how, over in CASES]
)
def test_averaging_wrappers(pools, how: str, over: str) -> None:
    for found in pools[4].run(run, how, over, timeout=120):
        check(found)


def run_summed() -> tuple[list[Deviation], list[str]]:
    """FSDP2 with a divisor of the user's own takes sums, here those of four losses."""
    torch._dynamo.reset()
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
    return compare(got, in_one_process(TOKENS)), reports[0].edges()


def test_wrappers_that_sum(pools) -> None:
    for found, said in pools[4].run(run_summed, timeout=120):
        check(found)
        assert (
            "gradients of 8 parameters: the share of each rank, for FSDP2, which sums "
            "over the ranks [0, 1, 2, 3]"
        ) in said


def run_refused(over: str, grad_sync: str) -> str:
    try:
        run("blocks", over, grad_sync)
    except BackendCompilerFailed as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("over", "grad_sync", "needed"),
    [
        ("dp_cp", "none", "needed 'average' for gradients over the ranks [0, 1]"),
        ("dp", "average", "needed 'reduce' for gradients over the ranks [0, 1]"),
        ("dp", "none", "needed 'reduce' for gradients over the ranks [0, 1]"),
    ],
)
def test_contradictions_are_refused(pools, over, grad_sync, needed) -> None:
    text = pools[4].run(run_refused, over, grad_sync, timeout=60)[0]
    assert f"options['grad_sync'] is {grad_sync!r}" in text
    assert "FSDP2, which averages over the ranks" in text
    assert needed in text


def test_reduce_may_be_named(pools) -> None:
    """Complete gradients have the right mean too; they cost another all-reduce."""
    for found in pools[4].run(run, "blocks", "dp_cp", "reduce", timeout=120):
        check(found)


def run_whole() -> tuple[list[Deviation], list[str]]:
    """The whole model is compiled under FSDP2, whose hooks break its graph."""
    torch._dynamo.reset()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("cpcompile").addHandler(handler)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model, both = new_gpt(), mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.layers:
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both)
    options = {"mesh": mesh, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    steps = ([batch] for batch in batches(TOKENS))
    got = train(model, steps, lambda t, y: loss_of(compiled(t), y))
    logging.getLogger("cpcompile").removeHandler(handler)
    return compare(got, in_one_process(TOKENS)), said


def test_hooks_that_break_the_graph_are_warned_of(pools) -> None:
    for found, said in pools[2].run(run_whole, timeout=120):
        check(found)
        assert len([x for x in said if "FSDP2's hooks break the graph" in x]) == 1


def run_unwrapped_later(first_wrapped: bool, train: bool) -> str:
    """One program, called under DDP and without it, in either order."""
    torch._dynamo.reset()
    model = new_gpt()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    compiled = torch.compile(
        model, backend="cp", options={"mesh": mesh, "inner": "aot_eager"}
    )
    calls = [DistributedDataParallel(compiled), compiled]
    tokens, labels = next(batches(TOKENS))
    try:
        for call in calls if first_wrapped else calls[::-1]:
            with torch.set_grad_enabled(train):
                loss = loss_of(call(tokens), labels)
            if train:
                model.zero_grad()
                loss.backward()
    except InputError as error:
        return str(error)
    if train:
        exact = in_one_process(TOKENS).gradients
        got = {f"grad of {n}": p.grad for n, p in model.named_parameters()}
        check(deviations(got, {f"grad of {n}": x for n, x in exact.items()}))
    return "right"


def test_a_program_that_is_unwrapped_later(pools) -> None:
    """Its gradients would be twice what they are."""
    for text in pools[2].run(run_unwrapped_later, True, True, timeout=90):
        assert "was compiled while its parameters were managed by DDP" in text
        assert "they are managed by no wrapper now" in text
        assert "call torch.compiler.reset()" in text


@pytest.mark.parametrize(
    ("first_wrapped", "train"), [(False, True), (True, False)], ids=["later", "eval"]
)
def test_other_orders_are_right(pools, first_wrapped: bool, train: bool) -> None:
    """A mean of complete gradients is right; without gradients nothing can be wrong."""
    found = pools[2].run(run_unwrapped_later, first_wrapped, train, timeout=90)
    assert found == ["right"] * 2


def run_reentrant(first_wrapped: bool) -> str:
    """Blocks that train under DDP, and without it in a reentrant checkpoint."""
    torch._dynamo.reset()
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
    try:
        loss_of(model.head(model.norm(x)), labels).backward()
    except InputError as error:
        return str(error)
    exact = in_one_process(TOKENS).gradients
    got = {f"grad of {n}": p.grad for n, p in model.named_parameters()}
    check(deviations(got, {f"grad of {n}": x for n, x in exact.items()}))
    return "right"


def test_a_reentrant_checkpoint_that_is_unwrapped_later(pools) -> None:
    """Its forward runs without gradients, and its program under the backward."""
    for text in pools[2].run(run_reentrant, True, timeout=90):
        assert "was compiled while its parameters were managed by DDP" in text
        assert "they are managed by no wrapper now" in text


def test_a_reentrant_checkpoint_that_is_never_wrapped(pools) -> None:
    assert pools[2].run(run_reentrant, False, timeout=90) == ["right"] * 2
