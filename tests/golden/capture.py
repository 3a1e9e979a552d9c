"""Runs the passes over what Dynamo traces, one by one, and keeps the texts between."""

from __future__ import annotations

import difflib
import logging
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import logs
from cpcompile.compile import attempts
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.errors import RewriteError
from cpcompile.passes.graph.context import Context, Findings
from cpcompile.passes.graph.graph_pass import GraphPass
from cpcompile.passes.graph.readable import readable
from cpcompile.passes.model.masks import constant_buffers
from cpcompile.passes.pipeline import MODEL
from cpcompile.ranks import layout_marks
from tests.golden.golden_text import bare_calls, golden_text, lines_with

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


@contextmanager
def fake_group(rank: int = 1, ranks: int = RANKS) -> Iterator[None]:
    """Make this process `rank` of a group that exchanges nothing.

    What was remembered for another group is forgotten: a mesh compares equal to that of
    another rank, or of a group that is gone, and DTensor finds its memories by it.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    forget()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget()


def forget() -> None:
    """Empty the caches that outlive a process group or a test."""
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
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
    **given: Any,
) -> Capture:
    """Trace `fn(*args)` with Dynamo and run the passes; nothing is computed.

    Keywords are options of backend="cp". A RewriteError of a pass is kept.
    """
    captures: list[Capture] = []

    def record(gm: fx.GraphModule, _: Any, ctx: Context) -> Any:
        profile = load_profile("h100_sxm")  # its numbers are not calibrated ones
        captures.append(_run(gm, replace(ctx, profile=profile), passes))
        raise _Captured

    options = {"strategy": strategy, "layout": layout, **given}
    with mock.patch.object(attempts, "run_passes", record):
        try:
            torch.compile(
                fn, backend="cp", fullgraph=True, dynamic=dynamic, options=options
            )(*args)
        except _Captured:
            pass
        except BackendCompilerFailed as error:
            raise error.inner_exception from None
    (captured,) = captures
    return captured


def _run(
    gm: fx.GraphModule, ctx: Context, passes: Sequence[GraphPass[Context]]
) -> Capture:
    steps: dict[str, Step] = {}
    for run in passes:
        before, whole = golden_text(gm.graph), readable(gm.graph)
        try:
            rewrites = run(gm.graph, replace(ctx, findings=_Declared(ctx, run)))
        except RewriteError as error:
            return Capture(steps, ctx, gm, error)
        gm.graph.lint()
        changed = readable(gm.graph) != whole
        steps[run.__name__] = Step(rewrites, before, golden_text(gm.graph), changed)
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


def sharded(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    *shape: int,
    more: tuple[Any, ...] = (),
) -> Capture:
    """Capture fn(x, *more), where x is plain, full, and to be sharded on dim 1."""
    x = torch.randn(shape or (2, 16, 8))
    captured = capture(fn, x, *more, mesh=mesh, shard={"x": 1})
    assert captured.error is None, captured.error
    return captured


def body(captured: Capture) -> str:
    """The graph after all passes, without inputs and shapes."""
    return bare_calls(captured.text)


def changes(step: Step) -> str:
    """The lines that a pass took away (-) and wrote (+), without shapes."""
    before, after = (bare_calls(x).splitlines() for x in (step.before, step.after))
    lines = difflib.ndiff(before, after)
    return "\n".join(x for x in lines if x.startswith(("- ", "+ ")))


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
