"""`cp.verify`: compare a model on several ranks with the same model on one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.apps.verification import on_rank
from cpcompile.apps.verification.differences import CallPlace, Check
from cpcompile.apps.verification.progress_bar import Tick, progress
from cpcompile.apps.verification.rank_results import (
    Ranks,
    local_processes,
    options_without_mesh,
    running_group,
)
from cpcompile.apps.verification.steps import (
    ComparedProgram,
    Reference,
    by_inductor,
    reference,
)
from cpcompile.apps.verification.verification_report import Report
from cpcompile.apps.verification.verify_mixer import MixerReport, verify_mixer
from cpcompile.errors import InputError
from cpcompile.ops.mixers.registry import mixer_of
from cpcompile.options import GradSync, parse_options
from cpcompile.settings import setting
from cpcompile.torch_private import pytree

WORLD = 4  # local processes, unless said otherwise
STEPS = 2
_PARTS = 7


@overload
def verify(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    world: int | None = None,
    steps: int = STEPS,
    show_progress: bool = False,
    **kwargs: Any,
) -> Report: ...


@overload
def verify(model: Callable[..., Any], *args: Any, **kwargs: Any) -> MixerReport: ...


def verify(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    world: int | None = None,
    steps: int = STEPS,
    show_progress: bool = False,
    **kwargs: Any,
) -> Report | MixerReport:
    """Compare a model under backend="cp" with the same model on one process.

    All floating-point results, the loss and every gradient are compared on every
    rank, and after `steps` steps of gradient descent the weights and buffers. The
    bounds follow from the errors that one process has against float64 (Note [Derived
    bounds] in apps/verification/bounds.py). If something differs, the first call of the
    model whose value or gradient differs is found, in float64 where it shows there.

    Args:
        model: any module with parameters that are plain tensors; it stays as it is. Or
            a function that `cp.register_mixer` was called for: what is claimed of it
            is tried on these arguments, in this process.
        args, kwargs: of one call, full plain tensors. The loss is the result "loss",
            else the first scalar, else a weighted sum of all results.
        options: of `torch.compile(..., backend="cp")`. The mesh may be left out.
        world: how many processes to start on this machine, 4 by default. In a process
            group that runs, its size; all ranks have to call this together.
        steps: of gradient descent.
        show_progress: print to stderr what is done.

    Returns: a Report; print it. `ok` says whether all is right.

    Raises: InputError, for less than 2 ranks, a group of another size, what cannot
    be pickled, a model without attention, attention with dropout; OptionError; and
    what the backend raises for the model.
    """
    if not isinstance(model, nn.Module) and mixer_of(model) is not None:
        return verify_mixer(model, args, kwargs)
    start = time.monotonic()
    options = dict(options or {})
    module = _checked(model, args, kwargs, options, steps)
    world = _world(world)
    program = ComparedProgram(module, args, kwargs, steps)
    state = torch.get_rng_state()
    try:
        with progress(_PARTS, show_progress) as tick:
            expected = _expected(program, tick)
            tick(f"start of {world} ranks")
            with _ranks(program, world, options) as ranks:
                verification = _Verification(ranks, program, expected, options, tick)
                return verification.report(world, start)
    finally:
        torch.set_rng_state(state)


class _Verification:
    def __init__(
        self,
        ranks: Ranks,
        program: ComparedProgram,
        expected: Reference,
        options: Mapping[str, Any],
        tick: Tick,
    ) -> None:
        self.ranks, self.program, self.expected = ranks, program, expected
        self.options, self.tick = options, tick

    def report(self, world: int, start: float) -> Report:
        """Run, compare, and look for the first difference if there is one."""
        options = options_without_mesh(self.options)
        name = type(self.program.model).__name__
        self.tick(f"compile and run on {world} ranks")
        (compiled, *_) = self.ranks.call(on_rank.compute, options, self.expected.rate)
        if not compiled.calls:
            raise InputError(
                f"{name} has no attention call in its graphs, so that there is nothing "
                "to verify; needed F.scaled_dot_product_attention, flex_attention, or "
                "attention by hand over a sequence"
            )
        if compiled.dropout:
            raise InputError(
                f"attention at {compiled.dropout[0]} drops weights at random, other "
                "ones than one process does; needed dropout 0 in attention, or "
                "model.eval()"
            )
        self.tick("compare")
        checks = self._checks()
        first: CallPlace | None = None
        notes: list[str] = []
        if not all(check.ok for check in checks):
            self.tick("look for the first difference")
            first, notes = self._first()
        return Report(
            model=name,
            world=world,
            options=_text(options),
            steps=self.program.steps,
            checks=tuple(checks),
            graphs=compiled.graphs,
            first=first,
            notes=tuple(notes),
            advice=_advice(checks, first, options),
            seconds=round(time.monotonic() - start, 1),
        )

    def _checks(self) -> list[Check]:
        """Check every tensor, on the rank where it is farthest off."""
        checks = self._compared(self.expected)
        is_inductor = self.options.get("inner", "inductor") == "inductor"
        if is_inductor and not all(check.ok for check in checks):
            self.tick("one process by Inductor, for the bounds")
            more = by_inductor(self.program, self.expected.rate)
            expected = self.expected
            rough = (*expected.rough, more)
            checks = self._compared(
                Reference(expected.exact, rough, expected.rate, expected.drawn)
            )
        return checks

    def _compared(self, expected: Reference) -> list[Check]:
        rank_checks = self.ranks.call(on_rank.compare, self.ranks.handed(expected))
        by_name: dict[tuple[str, str], list[Check]] = {}
        for check in (check for of_rank in rank_checks for check in of_rank):
            by_name.setdefault((check.kind, check.name), []).append(check)
        return [max(checks, key=lambda c: c.share) for checks in by_name.values()]

    def _first(self) -> tuple[CallPlace | None, list[str]]:
        """Find the first difference of all ranks, in float64 or as the model is."""
        for wide in (True, False):
            try:
                differences = self.ranks.call(on_rank.locate, wide)
            except (RuntimeError, ValueError) as error:
                line = str(error).strip().splitlines()[0]
                return None, [f"the graph does not run call by call: {line}"]
            differences = [x for x in differences if x is not None]
            if differences:
                order = min(order for order, _ in differences)
                here = [place for at, place in differences if at == order]
                return max(here, key=lambda x: x.error), []
        return None, [
            "run call by call in eager, no call differs in the first step: what "
            "differs is made after the passes, by AOTAutograd or by the inner "
            "compiler, or only in a later step"
        ]


def _expected(program: ComparedProgram, tick: Tick) -> Reference:
    """Compute the reference on one process; an error there rejects the model."""
    try:
        with torch._dynamo.config.patch(recompile_limit=on_rank.RECOMPILE_LIMIT):
            return reference(program, tick)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0]
        raise InputError(
            f"{type(program.model).__name__} does not run on one process, as it is and "
            f"in float64, with these inputs ({type(error).__name__}: {line}); needed a "
            "model whose calls all support float64"
        ) from error


def _checked(
    model: Any, args: Any, kwargs: Any, options: Mapping[str, Any], steps: int
) -> nn.Module:
    """Return the model; raise InputError for what cannot be compared."""
    if not isinstance(model, nn.Module):
        raise InputError(f"got {type(model).__name__} as the model; needed a module")
    if type(steps) is not int or steps < 1:
        raise InputError(f"got steps={steps!r}; needed a number of at least 1")
    parsed = parse_options(options)
    if parsed.grad_sync not in (None, GradSync.REDUCE):
        raise InputError(
            f"options['grad_sync'] is {parsed.grad_sync.value!r}, so that gradients "
            "are shares; needed complete ones: leave it away"
        )
    leaves = [*pytree.tree_leaves((args, kwargs)), *model.parameters()]
    if any(isinstance(x, DTensor) for x in leaves):
        raise InputError(
            "an input or a parameter is a DTensor, which one process cannot run; "
            "needed plain full tensors"
        )
    if not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
        raise InputError(
            "cp.verify got no tensor to call the model with; needed the arguments of "
            "one call: cp.verify(model, tokens, labels)"
        )
    return model


def _world(world: int | None) -> int:
    running = dist.get_world_size() if dist.is_initialized() else None
    wanted = (running or WORLD) if world is None else world
    if type(wanted) is not int or wanted < 2:
        raise InputError(f"got world={wanted!r}; needed at least 2 ranks to compare")
    if running is not None and running != wanted:
        raise InputError(
            f"got world={wanted}, and the process group that runs has {running} ranks; "
            f"needed world={running}, or a call before init_process_group"
        )
    return wanted


@contextmanager
def _ranks(
    program: ComparedProgram, world: int, options: Mapping[str, Any]
) -> Iterator[Ranks]:
    mesh: DeviceMesh | None = options.get("mesh")
    axis = options.get("axis", "cp")
    if mesh is None and not isinstance(axis, str):
        raise InputError(
            f"options['axis'] is {axis!r}, two axes; needed a mesh with both, in a "
            "process group that runs (torchrun)"
        )
    if dist.is_initialized():
        with running_group(program, mesh, axis) as group:
            yield group
    elif mesh is not None:
        raise InputError(
            "options['mesh'] is given, and no process group runs; leave it away"
        )
    else:
        with local_processes(program, world) as processes:
            yield processes


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in options.items()) or "default options"


def _advice(
    checks: list[Check], first: CallPlace | None, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Suggest what to try, from what differs."""
    if all(check.ok for check in checks):
        return ()
    advice = []
    if first is None and options.get("inner", "inductor") == "inductor":
        advice.append("options['inner'] = 'aot_eager', which leaves out Inductor")
        advice.append("cpcompile.config.unroll = 0, which leaves rings one operator")
        if setting("fold_repeated_blocks"):
            advice.append(
                "cpcompile.config.fold_repeated_blocks = False, which compiles each "
                "layer alone"
            )
    elif first is not None and "attention" in f"{first.call} {first.read_by}":
        chosen = options.get("strategy")
        other = "all_gather" if chosen != "all_gather" else "ring"
        advice.append(f"options['strategy'] = {other!r}, another way to compute it")
    if options.get("layout") != "contiguous":
        advice.append("options['layout'] = 'contiguous', which moves no tokens")
    advice.append("a report of this as an issue: results have to equal one process")
    return tuple(advice)
