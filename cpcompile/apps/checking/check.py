"""`cp.check`: what would several ranks do with this model? In seconds, on no rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.apps.checking.check_report import Check
from cpcompile.apps.checking.fake_step import RANKS, CheckedCall, FakeStep
from cpcompile.apps.checking.findings import Finding, Prices, findings_of
from cpcompile.apps.checking.longest_sequence import longest_sequence, saved_per_token
from cpcompile.cost.hardware.profile import HardwareProfile, load_profile
from cpcompile.cost.hardware.selection import profile_for_device
from cpcompile.cost.mixer_plan import MixerPlan
from cpcompile.errors import InputError
from cpcompile.options import parse_options
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import AttentionShare, account_of
from cpcompile.settings import setting
from cpcompile.torch_private import pytree


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
    given = (options, ranks, train, hardware, memory)
    return check_call(CheckedCall(model, args, kwargs, *given))


def check_call(call: CheckedCall, entry: str | None = None) -> Check:
    """Check a call as `check` does.

    entry: the "module:function" that has made the model, for the advice.
    """
    start = time.monotonic()
    _refuse_mistakes(call)
    call = replace(call, model=getattr(call.model, "_orig_mod", call.model))
    options = call.options or {}
    profile = _profile(call)
    step = call.step()
    itemsize = max((x.element_size() for x in call.model.parameters()), default=4)
    prices = Prices(profile, call.ranks, itemsize)
    findings = findings_of(step, prices, bool(options.get("shard")))
    per_token = saved_per_token(step.graphs)
    attention = [
        AttentionShare(x.path, x.form, x.reason)
        for graph in step.graphs
        for calls in (graph.calls, graph.by_hand)
        for x in calls
    ]
    mixers = tuple(x for graph in step.graphs for x in graph.mixers)
    text = ", ".join(f"{k}={v!r}" for k, v in options.items()) or "default options"
    return Check(
        model=type(call.model).__name__,
        ranks=call.ranks,
        train=call.backward,
        options=text,
        hardware=profile.name,
        attention=tuple(attention),
        mixers=mixers,
        explanation=Explanation(step.graphs),
        breaks=step.breaks,
        warnings=step.warnings,
        refused=step.refused,
        longest=longest_sequence(call, step.graphs, profile.name),
        saved_per_token=None if per_token is None else per_token[0],
        unknown=tuple(_unknown(step, mixers)),
        findings=findings,
        next=_next(step, findings, call.ranks, entry),
        seconds=round(time.monotonic() - start, 1),
    )


def _refuse_mistakes(call: CheckedCall) -> None:
    """Raise InputError for what cannot be checked."""
    if not isinstance(call.model, nn.Module):
        raise InputError(
            f"got {type(call.model).__name__} as the model; needed a module"
        )
    if type(call.ranks) is not int or call.ranks < 2:
        raise InputError(f"got ranks={call.ranks!r}; needed at least 2 ranks")
    memory = call.memory
    is_number = isinstance(memory, int | float)
    if memory is not None and not (is_number and memory > 0):
        what = memory if is_number else type(memory).__name__
        raise InputError(f"got memory={what}; needed the bytes of one rank")
    options = parse_options(call.options)
    if options.mesh is not None:
        raise InputError(
            "options['mesh'] is given, and cp.check makes one of fake ranks; needed "
            "ranks=, the number of ranks, in its place"
        )
    if not isinstance(options.axis, str):
        raise InputError(
            f"options['axis'] is {options.axis!r}, two axes, and fake ranks have one; "
            "needed the name of one, or none"
        )
    inputs = pytree.tree_leaves((call.args, call.kwargs))
    if any(isinstance(x, DTensor) for x in [*inputs, *call.model.parameters()]):
        raise InputError(
            "an input or a parameter is a DTensor, which belongs to ranks that exist; "
            "needed plain full tensors"
        )
    if not any(isinstance(x, Tensor) for x in inputs):
        raise InputError(
            "cp.check got no tensor to call the model with; needed the arguments of "
            "one call: cp.check(model, tokens, labels)"
        )


def _profile(call: CheckedCall) -> HardwareProfile:
    """Return the profile that a run would have, or the one that is asked for."""
    name = call.hardware or setting("hardware")
    if name is not None:
        return load_profile(name)
    device = call.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return profile_for_device(device.type, gpu, call.ranks)


def _unknown(step: FakeStep, mixers: Sequence[MixerPlan]) -> Iterator[str]:
    """Say what the numbers of the account leave out."""
    names = account_of(step.graphs).work().uncounted
    others = [x for x in names if not x.startswith("cp.mixer")]
    if len(others) < len(names):
        listed = ", ".join(sorted({x.name for x in mixers})) or "mixers"
        yield f"the work of {listed}"
    if others:
        yield f"the work of custom operators: {', '.join(others)}"
    if step.breaks:
        yield (
            "what runs in eager at graph breaks; it got zeros where it read values, "
            "and a run may take another way there"
        )
    if not step.graphs:
        yield 'anything: no graph was compiled by backend="cp"'


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
    proof = f"cp.verify(model, ..., world={ranks})"
    if entry:
        proof = f"`cpcompile verify {entry} --world {ranks}`"
    return (
        f"nothing costs more than it has to. {proof} proves that results are right; "
        f"then run it: torchrun --standalone --nproc-per-node {ranks} train.py"
    )
