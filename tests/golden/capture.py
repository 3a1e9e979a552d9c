"""Runs the passes over what Dynamo traces, one by one, and keeps the texts between."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo import trace_rules
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import logs
from cpcompile.compile import attempts
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.errors import RewriteError
from cpcompile.passes import pipeline
from cpcompile.passes.graph.context import Context, Findings
from cpcompile.passes.graph.graph_pass import GraphPass
from cpcompile.passes.graph.readable import readable
from cpcompile.passes.model.masks import constant_buffers
from cpcompile.passes.pipeline import MODEL
from cpcompile.ranks import layout_marks
from cpcompile.reporting.graph_report import GraphReport, recording
from tests.golden.golden_text import (
    bare_calls,
    difference,
    golden_text,
    lines_with,
)
from tests.support.settings import split

RANKS = 8


@dataclass(frozen=True)
class Step:
    """One pass: its count, the graph before and after it, and whether these differ."""

    rewrites: int
    before: str
    after: str
    changed: bool


@dataclass(frozen=True)
class Capture:
    """Every pass that ran, by name; `error` is what the last one raised, if it did."""

    steps: dict[str, Step]
    ctx: Context
    gm: fx.GraphModule
    error: RewriteError | None = None

    def __getitem__(self, name: str) -> Step:
        return self.steps[name]

    @property
    def text(self) -> str:
        """The graph after all passes."""
        assert self.error is None, self.error
        return list(self.steps.values())[-1].after

    def lines(self, *words: str) -> str:
        """The lines of the graph after all passes in which one of `words` occurs."""
        return lines_with(self.text, *words)


class _Captured(BaseException):
    """Ends a compilation whose passes have run."""


# Every new process group has Dynamo collect its rules for all of torch again, 0.1 s,
# because one that is made early might miss those for torch.distributed.
trace_rules.clear_lru_cache()
trace_rules.clear_lru_cache = lambda: None


_shared = False  # whether groups are kept for a next test that needs the same
_current: tuple[int, int] | None = None  # rank and ranks of the group that is kept


@contextmanager
def shared_groups() -> Iterator[None]:
    """Keep a fake group, and what DTensor derived for it, until another is needed.

    A group of which a test made others is not kept: a mesh of the next test would
    compare equal to one of those, and DTensor would find its groups.
    """
    global _shared
    _shared = True
    try:
        yield
    finally:
        _shared = False
        _end_group()


@contextmanager
def fake_group(rank: int = 1, ranks: int = RANKS) -> Iterator[None]:
    """Make this process `rank` of a group that exchanges nothing.

    What was remembered for another group is forgotten: a mesh compares equal to that of
    another rank, or of a group that is gone, and DTensor finds its memories by it.
    """
    global _current
    if _current != (rank, ranks):
        _end_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        _clear_sharding_prop_cache()
        _current = rank, ranks
    forget()
    try:
        yield
    finally:
        forget()
        if not _shared or len(dist.distributed_c10d._world.pg_map) > 1:
            _end_group()


@contextmanager
def fake_mesh(
    *shape: int, names: tuple[str, ...] = ("cp",), rank: int = 1
) -> Iterator[DeviceMesh]:
    """Make this process `rank` of a mesh that exchanges nothing."""
    with fake_group(rank, math.prod(shape)):
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


def _end_group() -> None:
    global _current
    if _current is not None:
        _current = None
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def forget() -> None:
    """Empty the caches that outlive a test."""
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    layout_marks.forget()
    constant_buffers.forget()


def capture(
    fn: Callable[..., Any],
    *args: Any,
    strategy: str = "ring",
    layout: str = "contiguous",
    passes: Sequence[GraphPass[Context]] = MODEL,
    dynamic: bool | None = False,
    until: str | None = None,
    backend: Any = "cp",
    **given: Any,
) -> Capture:
    """Trace `fn(*args)` with Dynamo and run the passes; nothing is computed.

    `until` names the last pass that runs. Other keywords are options or settings.
    A RewriteError of a pass is kept.
    """
    if until is not None:
        names = [run.__name__ for run in passes]
        passes = passes[: names.index(until) + 1]
    captures: list[Capture] = []

    def record(gm: fx.GraphModule, _: Any, ctx: Context) -> Any:
        profile = load_profile("h100_sxm")  # its numbers are not calibrated ones
        captures.append(_run(gm, replace(ctx, profile=profile), passes))
        raise _Captured

    options, settings = split({"strategy": strategy, "layout": layout, **given})
    with mock.patch.object(attempts, "run_passes", record), settings:
        try:
            torch.compile(
                fn, backend=backend, fullgraph=True, dynamic=dynamic, options=options
            )(*args)
        except _Captured:
            pass
        except BackendCompilerFailed as error:
            raise error.inner_exception from None
    (captured,) = captures
    return captured


@dataclass(frozen=True)
class Local:
    """The joint graph of one rank, and what was reported of it."""

    text: str
    report: GraphReport

    def lines(self, *words: str) -> str:
        """The lines in which one of `words` occurs."""
        return lines_with(self.text, *words)


def localised(
    fn: Callable[..., Any], *args: Any, after: str = "localise", **given: Any
) -> Local:
    """The graph of this rank of fn(*args), forward and backward, after a pass.

    Other keywords are options or settings.
    """
    texts: list[str] = []

    def traced(graph: fx.Graph, name: str) -> None:
        if name == f"cp_{after}":
            texts.append(readable(graph))

    options, settings = split({"inner": "aot_eager", **given})
    with mock.patch.object(pipeline, "_trace", traced), settings, recording() as found:
        torch.compile(fn, backend="cp", fullgraph=True, options=options)(*args)
    (text,), (report,) = texts, found
    return Local(text, report)


def capture_pass(name: str, fn: Callable[..., Any], *args: Any, **given: Any) -> Step:
    """Capture the pass that is called `name`; those after it do not run."""
    return capture(fn, *args, until=name, **given)[name]


def _run(
    gm: fx.GraphModule, ctx: Context, passes: Sequence[GraphPass[Context]]
) -> Capture:
    steps: dict[str, Step] = {}
    whole, text = readable(gm.graph), golden_text(gm.graph)
    for run in passes:
        before, whole_before = text, whole
        try:
            rewrites = run(gm.graph, replace(ctx, findings=_Declared(ctx, run)))
        except RewriteError as error:
            return Capture(steps, ctx, gm, error)
        gm.graph.lint()
        whole = readable(gm.graph)
        changed = whole != whole_before
        if changed:
            text = golden_text(gm.graph)
        steps[run.__name__] = Step(rewrites, before, text, changed)
    gm.recompile()
    return Capture(steps, ctx, gm)


class _Declared(Findings):
    """The findings of `ctx`, as far as a pass says that it reads and writes them."""

    def __init__(self, ctx: Context, run: GraphPass[Context]) -> None:
        object.__setattr__(self, "_of", (ctx.findings, run))

    def __getattribute__(self, name: str) -> Any:
        findings, run = object.__getattribute__(self, "_of")
        assert name in run.reads | run.writes, f"{run.__name__} reads {name}"
        return getattr(findings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        findings, run = object.__getattribute__(self, "_of")
        assert name in run.writes, f"{run.__name__} writes {name}"
        setattr(findings, name, value)


def changes(step: Step) -> str:
    """What a pass wrote, gave other operands and took away, without shapes."""
    return difference(bare_calls(step.before), bare_calls(step.after))


def without_lines(text: str) -> str:
    """A message without the position in the file."""
    return re.sub(r"File [^)]*", "LINE", text)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The texts of our own warnings, in order."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("cpcompile") and record.levelno == logging.WARNING
    ]
