"""Run the compiled model on every rank, compare, and find the first difference.

The functions are called one after another, on all ranks together, and keep what they
made in the process. What they raise is returned: errors of Dynamo cannot be sent.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpcompile import config
from cpcompile.apps.verification.compare import compared
from cpcompile.apps.verification.differences import CallPlace, Check
from cpcompile.apps.verification.replay.locate import described
from cpcompile.apps.verification.replay.replay import Difference, GraphReplay, Log
from cpcompile.apps.verification.steps import ComparedProgram, Reference, results_of
from cpcompile.passes.rewrites import watching
from cpcompile.reporting.graph_report import GraphReport, recording
from cpcompile.reporting.tracing import WARM_UP_STEPS, own_times, trace_text
from cpcompile.torch_patches import local_memory, redistribute_plans, tracing

T = TypeVar("T")

# Copies of one model are compiled beside each other.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Raised:
    """An exception of a rank: the name of its class, and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Compiled:
    """How the program was compiled.

    graphs: a summary of each in words. calls: number of attention calls. dropout: the
        modules whose calls have dropout.
    """

    graphs: tuple[str, ...]
    calls: int
    dropout: tuple[str, ...]


@dataclass
class _Session:
    program: ComparedProgram
    mesh: DeviceMesh
    log: Log = field(default_factory=Log)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    call: Any = None


_session: _Session | None = None


def raised_or(fn: Callable[..., T]) -> Callable[..., T | Raised]:
    """Wrap `fn` so that it returns what it raises, as data."""

    @functools.wraps(fn)
    def call(*args: Any) -> T | Raised:
        try:
            return fn(*args)
        except Exception as error:  # whatever a model makes torch raise
            inner = getattr(error, "inner_exception", None) or error
            return Raised(type(inner).__name__, str(inner))

    return call


@raised_or
def load(path: str, settings: Mapping[str, Any]) -> None:
    """Load the program that another process has written, and its settings."""
    for name, value in settings.items():
        setattr(config, name, value)
    begin(pickle.loads(Path(path).read_bytes()), None)


def end() -> None:
    """Drop the program and all that was made of it."""
    global _session
    _session = None


def begin(program: ComparedProgram, mesh: DeviceMesh | None, axis: str = "cp") -> None:
    """Set the program of this rank; without a mesh, make one of all ranks."""
    global _session
    own = program.copied()
    device = next((x.device.type for x in own.model.parameters()), "cpu")
    if mesh is None:
        mesh = init_device_mesh(
            device, (dist.get_world_size(),), mesh_dim_names=(axis,)
        )
    _session = _Session(own, mesh)


@raised_or
def compute(options: Mapping[str, Any], rate: float) -> Compiled:
    """Compile the program and run its steps."""
    session = _the_session()
    options = dict(options) | {"mesh": session.mesh}
    # Imported late: a rank that imports it says that it is there. As a function of its
    # own it is compiled anew, though Dynamo may know the program.
    from cpcompile.backend import cp

    backend = functools.partial(cp, options=options)
    session.call = torch.compile(session.program.model, backend=backend)
    start = session.program.copied()
    with recording() as reports, watching(session.log.watch), _many_programs():
        values = results_of(session.program, session.call, rate)
    session.values = values
    session.program.model.load_state_dict(start.model.state_dict())
    once: dict[int, GraphReport] = {id(report): report for report in reports}
    return Compiled(
        graphs=tuple(report.summary() for report in once.values()),
        calls=sum(len(r.calls) + len(r.by_hand) for r in once.values()),
        dropout=tuple(c.path for r in once.values() for c in r.calls if c.dropout_p),
    )


@raised_or
def compare(reference: Reference | str) -> list[Check]:
    """Compare all tensors of this rank with those of one process.

    reference: the tensors of one process, or the path of a file with them.
    """
    by: Reference = (
        pickle.loads(Path(reference).read_bytes())
        if isinstance(reference, str)
        else reference
    )
    return compared(_the_session().values, by, dist.get_rank())


@raised_or
def locate(wide: bool) -> tuple[tuple[int, ...], CallPlace] | None:
    """Find this rank's first difference, with its order in the program."""
    session = _the_session()
    log = session.log
    log.wide, log.replays = wide, []
    with ExitStack() as stack:
        # As where the graph is traced.
        for context in (
            tracing.backend_runs,
            tracing.plain_means_replicated,
            local_memory.copied_if_need_be,
            redistribute_plans.plans_are_kept,
            _many_programs,
        ):
            stack.enter_context(context())
        results_of(session.program, session.call, 0.0, steps=0)
        for replay in log.replays:
            replay.compare_gradients()
    replays, log.replays = log.replays, None
    differences: list[tuple[GraphReplay, Difference]] = [
        (replay.graph, x) for replay in replays for x in replay.differences
    ]
    if not differences:
        return None
    graph, first = min(differences, key=lambda x: x[1].order)
    dtype = "float64" if wide else "the dtype of the model"
    return first.order, described(graph, first, dist.get_rank(), dtype)


@raised_or
def trace(options: Mapping[str, Any]) -> tuple[str, str, tuple[GraphReport, ...]]:
    """Record one warm step; return its trace, a table of its times, and its graphs."""
    session = _the_session()
    model = session.program.model
    options = dict(options) | {"mesh": session.mesh}
    call = torch.compile(model, backend="cp", options=options)
    profile = torch.profiler.profile(acc_events=True)
    with recording() as reports:
        for step in range(WARM_UP_STEPS + 1):
            reports.clear()
            if step == WARM_UP_STEPS:
                dist.barrier()
                profile.start()
            results_of(session.program, call, 0.0, steps=0)
    profile.stop()
    return trace_text(profile), own_times(profile), tuple(reports)


def _the_session() -> _Session:
    assert _session is not None, "a program comes first"
    return _session


@contextmanager
def _many_programs() -> Iterator[None]:
    """Compile every program that is asked for, and watch none of them."""
    with (
        torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
        # Ranks that drift apart are to be reported, with the place, and not to end it.
        config.patch(check_ranks=0, profile=None),
    ):
        yield
