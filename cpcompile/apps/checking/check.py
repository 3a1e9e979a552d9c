"""`cp.check`: what would several ranks do with this model? In seconds, on no rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.apps.checking.check_report import (
    AttentionShare,
    Check,
    GraphBreakPlace,
)
from cpcompile.apps.checking.fake_step import CheckedCall, FakeStep
from cpcompile.apps.checking.findings import Finding, Prices, findings_of
from cpcompile.apps.checking.longest_sequence import (
    device_memory,
    longest_sequence,
    saved_per_token,
)
from cpcompile.cost.hardware.profile import HardwareProfile, load_profile
from cpcompile.cost.hardware.selection import profile_for_device
from cpcompile.errors import InputError
from cpcompile.options import parse_options
from cpcompile.reporting.break_texts import place_text, way_out
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import GraphReport
from cpcompile.settings import setting
from cpcompile.torch_patches.graph_breaks import reason_text
from cpcompile.torch_private import pytree

RANKS = 4  # as cp.verify starts


def check(
    model: nn.Module,
    *args: Any,
    ranks: int = RANKS,
    train: bool = True,
    options: Mapping[str, Any] | None = None,
    memory: float | None = None,
    hardware: str | None = None,
    **kwargs: Any,
) -> Check:
    """Say what `ranks` ranks would do with a call of the model, without any rank.

    The call is compiled with backend="cp" in this process, as the first of ranks that
    exchange nothing, and nothing is computed: a sequence may be as long as it will be.
    Attention, work and messages are those that `cp.explain` reports of a run.
    `cp.verify` is what proves that results are right.

    Args:
        model: any module whose parameters are plain tensors, also on the device
            "meta", which has no memory; it stays as it is. What torch.compile has made
            in this process before is compiled again at its next call.
        args, kwargs: of one call, full plain tensors; by position where the model
            calls them as one of the arguments below.
        ranks: number of ranks that would share the sequence, at least 2.
        train: whether a training step is meant; False is the forward alone.
        options: of `torch.compile(..., backend="cp")`, without a mesh.
        memory: bytes of one rank, for the longest sequence; by default those of the GPU
            that the model is on, and none on a CPU.
        hardware: the profile by which strategies are chosen, such as "h100"; by default
            that of this machine.

    Returns: a Check; print it.

    Raises: InputError in a process group that runs, for less than 2 ranks, what is no
    module, a mesh, DTensors, no tensor to call with, a model that does not run, which
    torch alone does not compile either; OptionError; RewriteError for a mistake in
    cpcompile; ValueError for an unknown profile.
    """
    return check_call(
        model,
        args,
        kwargs,
        ranks=ranks,
        train=train,
        options=options,
        memory=memory,
        hardware=hardware,
    )


def check_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ranks: int = RANKS,
    train: bool = True,
    options: Mapping[str, Any] | None = None,
    memory: float | None = None,
    hardware: str | None = None,
    entry: str | None = None,
) -> Check:
    """Check a call as `check` does.

    entry: the "module:function" that has made the model, for the advice.
    """
    start = time.monotonic()
    options = _checked(model, args, kwargs, ranks, options, memory)
    module = getattr(model, "_orig_mod", model)  # of torch.compile
    call = CheckedCall(module, args, kwargs, options, ranks, train, hardware)
    profile = _profile(call)
    step = call.step()
    prices = Prices(profile, ranks, _itemsize(module))
    findings = findings_of(step, prices, bool(options.get("shard")))
    memory = device_memory(module) if memory is None else memory
    longest = None
    if memory is not None:
        longest = longest_sequence(call, step.graphs, memory, profile)
    per_token = saved_per_token(call, step.graphs)
    attention = tuple(x for graph in step.graphs for x in _attention(graph))
    return Check(
        model=type(module).__name__,
        ranks=ranks,
        train=train,
        options=_text(options),
        hardware=profile.name,
        attention=attention,
        mixers=tuple(x for graph in step.graphs for x in graph.mixers),
        explanation=Explanation(step.graphs),
        breaks=tuple(
            GraphBreakPlace(
                place_text(x.places), reason_text(x.text), way_out(x.text, x.places)
            )
            for x in step.breaks
        ),
        warnings=step.warnings,
        refused=step.refused,
        longest=longest,
        saved_per_token=None if per_token is None else per_token[0],
        unknown=tuple(_unknown(step)),
        findings=findings,
        next=_next(step, findings, ranks, entry),
        seconds=round(time.monotonic() - start, 1),
    )


def _checked(
    model: Any,
    args: Any,
    kwargs: Any,
    ranks: Any,
    options: Mapping[str, Any] | None,
    memory: Any,
) -> dict[str, Any]:
    """Return the options; raise InputError for what cannot be checked."""
    if not isinstance(model, nn.Module):
        raise InputError(f"got {type(model).__name__} as the model; needed a module")
    if type(ranks) is not int or ranks < 2:
        raise InputError(f"got ranks={ranks!r}; needed at least 2 ranks")
    is_size = isinstance(memory, int | float) and memory > 0
    if memory is not None and not is_size:
        what = memory if isinstance(memory, int | float) else type(memory).__name__
        raise InputError(f"got memory={what}; needed the bytes of one rank")
    parsed = parse_options(options)
    if parsed.mesh is not None:
        raise InputError(
            "options['mesh'] is given, and cp.check makes one of fake ranks; needed "
            "ranks=, the number of ranks, in its place"
        )
    if not isinstance(parsed.axis, str):
        raise InputError(
            f"options['axis'] is {parsed.axis!r}, two axes, and fake ranks have one; "
            "needed the name of one, or none"
        )
    inputs = pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, DTensor) for x in [*inputs, *model.parameters()]):
        raise InputError(
            "an input or a parameter is a DTensor, which belongs to ranks that exist; "
            "needed plain full tensors"
        )
    if not any(isinstance(x, Tensor) for x in inputs):
        raise InputError(
            "cp.check got no tensor to call the model with; needed the arguments of "
            "one call: cp.check(model, tokens, labels)"
        )
    return dict(options or {})


def _profile(call: CheckedCall) -> HardwareProfile:
    """Return the profile that a run would have, or the one that is asked for."""
    name = call.hardware or setting("hardware")
    if name is not None:
        return load_profile(name)
    return profile_for_device(call.device_type, call.device_name, call.ranks)


def _itemsize(model: nn.Module) -> int:
    return max((x.element_size() for x in model.parameters()), default=4)


def _attention(graph: GraphReport) -> list[AttentionShare]:
    """Return the attention calls of a graph, those by hand at the end."""
    calls = [AttentionShare(x.path, x.form, x.reason) for x in graph.calls]
    calls += [AttentionShare(x.path, x.form, x.reason) for x in graph.by_hand]
    return calls


def _unknown(step: FakeStep) -> list[str]:
    """Say what the numbers of the account leave out."""
    accounts = [x for graph in step.graphs for x in graph.accounts]
    names = dict.fromkeys(x for y in accounts for x in y.work.uncounted)
    lines = []
    mixers = {x.name for graph in step.graphs for x in graph.mixers}
    ours = [x for x in names if x.startswith("cp.mixer")]
    if ours:
        lines.append(f"the work of {', '.join(sorted(mixers)) or 'mixers'}")
    if others := [x for x in names if x not in ours]:
        lines.append(f"the work of custom operators: {', '.join(others)}")
    if step.breaks:
        lines.append(
            "what runs in eager at graph breaks; it got zeros where it read values, "
            "and a run may take another way there"
        )
    if not step.graphs:
        lines.append('anything: no graph was compiled by backend="cp"')
    return lines


def _next(
    step: FakeStep, findings: tuple[Finding, ...], ranks: int, entry: str | None
) -> str:
    """Say the one thing to do next."""
    if not step.graphs:
        return (
            "call the model so that torch.compile sees it: no graph was compiled. "
            "TORCH_LOGS=graph_breaks says why"
        )
    if step.refused is not None:
        return (
            f"mend what is refused, or set options={{'strict': False}}, which runs it "
            f"on gathered tensors: {step.refused.splitlines()[0]}"
        )
    if findings:
        return str(findings[0])
    proof = (
        f"`cpcompile verify {entry} --world {ranks}`"
        if entry
        else (f"cp.verify(model, ..., world={ranks})")
    )
    return (
        f"nothing costs more than it has to. {proof} proves that results are right; "
        f"then run it: torchrun --standalone --nproc-per-node {ranks} train.py"
    )


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in options.items()) or "default options"
