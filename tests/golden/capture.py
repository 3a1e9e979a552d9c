"""Runs the passes over what Dynamo traces, one by one, and keeps the texts between."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import backend, logs
from cpcompile.errors import CannotRewrite
from cpcompile.hardware.profile import load_profile
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import readable
from cpcompile.passes.pipeline import PASSES
from cpcompile.ranks import layout_marks

RANKS = 8
_GROUP = re.compile(
    r"(= cp\.(?!hybrid)(?:\w+_attention|relayout).*), [^, =]+"
    r"((?:, (?:bias|key_ranges|\w+_segment_ids|known|layout)=\w+)*\))(?=$|  #)",
    re.MULTILINE,
)
_GROUPS = re.compile(
    r"(= cp\.hybrid_attention.*)(, [^, ]+){3}, (True|False)\)(?=$|  #)"
)


@dataclass(frozen=True)
class Step:
    """One pass: its count, and the graph before and after it."""

    rewrites: int
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Whether the pass wrote into the graph."""
        return self.before != self.after


@dataclass(frozen=True)
class Capture:
    """Every pass that ran, by name; `error` is what the last one raised, if it did."""

    steps: dict[str, Step]
    ctx: Context
    gm: fx.GraphModule
    error: CannotRewrite | None = None

    def __getitem__(self, name: str) -> Step:
        return self.steps[name]

    @property
    def text(self) -> str:
        """The graph after all passes."""
        assert self.error is None, self.error
        return list(self.steps.values())[-1].after

    def lines(self, *words: str) -> str:
        """The lines of the graph after all passes in which one of `words` occurs."""
        found = [x for x in self.text.splitlines() if any(w in x for w in words)]
        return "\n".join(found)


class _Captured(BaseException):
    """Ends a compilation whose passes have run."""


@contextmanager
def fake_group(rank: int = 1, ranks: int = RANKS) -> Iterator[None]:
    """This process is `rank` of a group that exchanges nothing.

    What was remembered for another rank is forgotten: a mesh compares equal to that of
    another rank, and DTensor finds its memories by it.
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


def capture(
    fn: Callable[..., Any],
    *args: Any,
    strategy: str = "ring",
    layout: str = "contiguous",
    **given: Any,
) -> Capture:
    """Trace `fn(*args)` with Dynamo and run every pass; nothing is computed.

    Keywords are options of backend="cp". A CannotRewrite of a pass is kept.
    """
    captures: list[Capture] = []

    def record(gm: fx.GraphModule, ctx: Context) -> Any:
        ctx.profile = load_profile("h100_sxm")  # its numbers are not calibrated ones
        captures.append(_run(gm, ctx))
        raise _Captured

    options = {"strategy": strategy, "layout": layout, **given}
    with mock.patch.object(backend, "run_passes", record):
        try:
            torch.compile(
                fn, backend="cp", fullgraph=True, dynamic=False, options=options
            )(*args)
        except _Captured:
            pass
        except BackendCompilerFailed as error:
            raise error.inner_exception from None
    (captured,) = captures
    return captured


def _run(gm: fx.GraphModule, ctx: Context) -> Capture:
    steps: dict[str, Step] = {}
    for run in PASSES:
        before = _text(gm)
        try:
            rewrites = run(gm.graph, ctx)
        except CannotRewrite as error:
            return Capture(steps, ctx, gm, error)
        gm.graph.lint()
        steps[run.__name__] = Step(rewrites, before, _text(gm))
    gm.recompile()
    return Capture(steps, ctx, gm)


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
    lines = [x.split("  # ")[0] for x in captured.text.splitlines()]
    return "\n".join(x for x in lines if not x.endswith("= input"))


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


def _text(gm: fx.GraphModule) -> str:
    """The graph as text; the names of groups depend on those made before."""
    text = _GROUP.sub(r"\1, GROUP\2", readable(gm.graph))
    return _GROUPS.sub(r"\1, GROUP, ULYSSES, RING, \3)", text)
