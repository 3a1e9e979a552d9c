"""What every rank does with a program: run it alone, run it compiled, compare."""

from __future__ import annotations

import copy
import linecache
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.nn as nn
from torch import Tensor

import cpcompile as cp
from cpcompile import errors
from cpcompile.apps.verification.bounds import whole
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.fuzz.compare import MOVE, Values, beyond, distances
from tests.support.profiled_messages import Messages, differences

REFUSALS = (errors.RewriteError, errors.InputError, errors.OptionError)


@dataclass(frozen=True)
class Raised:
    """An exception, as plain data.

    refusal: whether it is a refusal of ours.
    early: whether Dynamo raised it before it called a backend.
    """

    kind: str
    text: str
    trace: str
    refusal: bool = False
    early: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Of what a backend raised, if Dynamo wrapped it."""
        inner = getattr(error, "inner_exception", None) or error
        trace = "".join(traceback.format_exception(error))
        return cls(
            kind=type(inner).__name__,
            text=str(inner),
            trace=trace[-6000:],
            refusal=isinstance(inner, REFUSALS),
            early="symbolic_convert.py" in trace
            and "cpcompile/backend.py" not in trace,
        )


@dataclass(frozen=True)
class RankRun:
    """What one rank found.

    alone: what one process raised in eager; then nothing else ran.
    raised: what the compiled program raised.
    wrong: values out of bounds.
    calls: attention calls, and how many of them were shared out.
    """

    alone: Raised | None = None
    raised: Raised | None = None
    wrong: tuple[str, ...] = ()
    error: float = 0.0
    calls: tuple[int, int] = (0, 0)
    seconds: float = 0.0


def load(source: str) -> ModuleType:
    """The program as a module, whose lines tracebacks can show."""
    name = "fuzzed_program"
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    sys.modules[name] = module
    lines = source.splitlines(keepends=True)
    linecache.cache[module.__file__] = (len(source), None, lines, module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def run_on_rank(source: str, world: int, accounts: bool = False) -> RankRun:
    """Compare backend="cp" with one process; called on every rank.

    accounts: whether what explain lists is compared with what the profiler counts.
    """
    program = _fresh(source)
    model = make_model(program)
    try:
        exact, moved = reference(program, model)
    except Exception as error:  # whatever a program does wrong
        return RankRun(alone=Raised.of(error))
    options = dict(program.OPTIONS)
    mesh = sequence_mesh(world)
    if program.DOOR != "dtensor":
        options["mesh"] = mesh
    if program.DOOR == "named":
        options["shard"] = program.SHARD
    compiled = torch.compile(
        model, backend="cp", options=options, dynamic=program.DYNAMIC
    )
    start = time.monotonic()
    try:
        with (
            cp.config.patch(hardware="cpu", agreement_timeout_seconds=60.0),
            cp.config.patch(program.SETTINGS),
            recording() as reports,
        ):
            got = steps(program, compiled, model, door_of(program, mesh))
    except Exception as error:  # whatever a program can make torch and us raise
        return RankRun(raised=Raised.of(error), seconds=time.monotonic() - start)
    found = distances(got, exact)
    calls = [call for report in reports for call in report.calls]
    wrong = beyond(found, moved, str(program.DTYPE).removeprefix("torch."))
    gathered = program.SETTINGS["gather_outputs_megabytes"] != 0
    gathers_outside = program.DOOR == "dtensor" or not gathered
    if accounts and not gathers_outside:
        wrong = [*wrong, *miscounted(lambda: steps(program, compiled, model), world)]
    return RankRun(
        wrong=tuple(wrong),
        error=max(found.values(), default=0.0),
        calls=(len(calls), sum(call.plan is not None for call in calls)),
        seconds=time.monotonic() - start,
    )


def miscounted(step: Callable[[], Any], world: int) -> list[str]:
    """Where explain lists other messages than the profiler counts."""
    rank = torch.distributed.get_rank()
    with recording() as reports, Messages(world, rank) as profiled:
        step()
    accounts = [account for report in reports for account in report.accounts]
    return differences(accounts, profiled)


def run_without_cp(source: str, inner: str) -> RankRun:
    """The program in torch.compile(backend=inner) on one process."""
    program = _fresh(source)
    model = make_model(program)
    try:
        exact, moved = reference(program, model)
        compiled = torch.compile(model, backend=inner, dynamic=program.DYNAMIC)
        got = steps(program, compiled, model)
    except Exception as error:
        return RankRun(raised=Raised.of(error))
    found = distances(got, exact)
    dtype = str(program.DTYPE).removeprefix("torch.")
    return RankRun(wrong=tuple(beyond(found, moved, dtype)))


def _fresh(source: str) -> ModuleType:
    torch._dynamo.reset()
    warn_once.cache_clear()
    # random numbers are those of eager, and one compilation at a time is enough
    inductor_config.fallback_random = True
    inductor_config.compile_threads = 1
    return load(source)


def make_model(program: ModuleType) -> nn.Module:
    """The model with its seed, in the dtype of the program."""
    torch.manual_seed(1)
    model: nn.Module = program.Model().to(program.DTYPE)
    return model


def reference(program: ModuleType, model: nn.Module) -> tuple[Values, dict[str, float]]:
    """The values of one process in float64, and how far they move; see compare.py.

    Dropout draws in a compiled graph as aot_eager does, so that it is the reference.
    """
    runs = []
    double = bool(torch.float64 == program.DTYPE)
    for again in (False, True):
        other = copy.deepcopy(model)
        precise = program.DTYPE if again else torch.float64
        other.to(precise)
        if again and double:
            _move(list(other.parameters()))
        called: Callable[..., Any] = other
        if program.DRAWN:
            called = torch.compile(other, backend="aot_eager")
        give = _moved if again and double else plain
        runs.append(steps(program, called, other, give, precise))
        if program.DRAWN:
            torch._dynamo.reset()
    return runs[0], distances(runs[1], runs[0])


def _move(tensors: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in tensors:
            if x.is_floating_point():
                signs = torch.rand(x.shape, generator=generator).round() * 2 - 1
                x.mul_(1 + MOVE * signs.to(x.dtype))


Door = Callable[[str, Tensor], Tensor]


def plain(name: str, x: Tensor) -> Tensor:
    """What one process is given."""
    return x


def _moved(name: str, x: Tensor) -> Tensor:
    y = x.detach().clone()
    _move([y])
    return y.requires_grad_(x.requires_grad)


def door_of(program: ModuleType, mesh: Any) -> Door:
    """What ranks are given in its place."""

    def give(name: str, x: Tensor) -> Tensor:
        if program.DOOR != "dtensor" or name not in program.SHARD:
            return x
        given: Tensor = cp.shard(x.detach(), mesh, program.SHARD[name])
        return given.detach().requires_grad_(x.requires_grad)

    return give


def steps(
    program: ModuleType,
    called: Callable[..., Any],
    model: nn.Module,
    door: Door = plain,
    dtype: torch.dtype | None = None,
) -> Values:
    """Calls with all lengths; results, gradients and buffers."""
    values: Values = {}
    train = program.MODE == "train"
    model.train(train)
    model.zero_grad()
    for number, length in enumerate(program.LENGTHS):
        for module in model.modules():
            module.rate = 0.2 + number / 8  # of what changes from call to call
        torch.manual_seed(2 + number)
        made = program.inputs(length, program.BATCH + number * program.GROWTH)
        if dtype is not None:
            made = {
                k: x.detach().to(dtype).requires_grad_(x.requires_grad)
                if x.is_floating_point()
                else x
                for k, x in made.items()
            }
        given = {name: door(name, x) for name, x in made.items()}
        torch.manual_seed(5 + number)
        with nullcontext() if train else torch.no_grad():
            results = called(**given)
        results = results if isinstance(results, tuple) else (results,)
        if train and results[0].requires_grad:
            results[0].backward()
        for place, result in enumerate(results):
            values[f"result {number}.{place}"] = whole(result).clone()
        for name, x in given.items():
            if x.grad is not None:
                values[f"grad {number}.{name}"] = whole(x.grad).clone()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[f"grad {name}"] = whole(parameter.grad).clone()
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = whole(buffer).clone()
    return values
