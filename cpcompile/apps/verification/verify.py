"""`cp.verify`: compare a model on several ranks with the same model on one process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.apps.verification import on_rank
from cpcompile.apps.verification.compare import Check, checks_of
from cpcompile.apps.verification.module_outputs import described, place_of
from cpcompile.apps.verification.ranks import Ranks, told
from cpcompile.apps.verification.steps import ComparedProgram, by_inductor, reference
from cpcompile.apps.verification.verification_report import Difference, Report
from cpcompile.apps.verification.verify_mixer import MixerReport, verify_mixer
from cpcompile.errors import InputError
from cpcompile.ops.mixers.registry import mixer_of
from cpcompile.options import GradSync, parse_options
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.step_trace import merged
from cpcompile.settings import setting
from cpcompile.torch_private import pytree

STEPS = 2


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
    bounds] in apps/verification/bounds.py). If something differs, the first module
    whose output or gradient differs is found.

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
    program = _checked(model, args, kwargs, options, steps)
    ranks = Ranks(world, options)
    options.pop("mesh", None)  # each rank has it itself
    state = torch.get_rng_state()
    try:
        return Verification(ranks, program, options, told(show_progress)).report(start)
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Verification:
    """A program that ranks run with these options, and how to compare it."""

    ranks: Ranks
    program: ComparedProgram
    options: Mapping[str, Any]
    tell: Callable[[str], None]

    def report(self, start: float) -> Report:
        """Run, compare, and look for the first difference if there is one."""
        name = type(self.program.model).__name__
        ran, checks = self.compared(self.program, self.options)
        if not ran.calls:
            raise InputError(
                f"{name} has no attention call in its graphs, so that there is nothing "
                "to verify; needed F.scaled_dot_product_attention, flex_attention, or "
                "attention by hand over a sequence"
            )
        if ran.dropout:
            raise InputError(
                f"attention at {ran.dropout[0]} drops weights at random, other "
                "ones than one process does; needed dropout 0 in attention, or "
                "model.eval()"
            )
        first, notes = (None, ()) if _all_right(checks) else self.first()
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return Report(
            model=name,
            world=self.ranks.world,
            options=options or "default options",
            steps=self.program.steps,
            checks=tuple(checks),
            graphs=ran.graphs,
            first=first,
            notes=notes,
            advice=_advice(checks, first, self.options),
            seconds=round(time.monotonic() - start, 1),
        )

    def compared(
        self, program: ComparedProgram, options: Mapping[str, Any]
    ) -> tuple[on_rank.Ran, list[Check]]:
        """Check every tensor, on the rank where it is farthest off."""
        expected = reference(program, self.tell)
        self.tell(f"compile and run on {self.ranks.world} ranks")
        ran = self.ranks.run(
            on_rank.compute, program, options, expected.exact, expected.rate
        )
        errors = [x.errors for x in ran]
        checks = checks_of(errors, expected)
        if options.get("inner", "inductor") == "inductor" and not _all_right(checks):
            self.tell("one process by Inductor, for the bounds")
            rough = (*expected.rough, by_inductor(program, expected.rate))
            checks = checks_of(errors, dataclasses.replace(expected, rough=rough))
        return ran[0], checks

    def first(self) -> tuple[Difference | None, tuple[str, ...]]:
        """Find the first difference by modules, in float32 or as the model is."""
        options = {**self.options, "inner": "aot_eager"}
        notes = []
        own = next((x.dtype for x in self.program.model.parameters()), torch.float32)
        # In float32, less is within the bounds.
        for dtype in (torch.float32, own) if self.program.is_narrow else (own,):
            again = self.program.copied(None if dtype is own else dtype)
            again = dataclasses.replace(again, steps=0, by_module=True)
            where = f"by modules, in {str(dtype).removeprefix('torch.')}, "
            try:
                _, checks = self.compared(again, options)
            except (RuntimeError, ValueError) as error:
                line = str(error).strip().splitlines()[0]
                notes.append(f"{where}the model does not run: {line}")
                continue
            first = _first_of(checks, self.program.model, dtype)
            if first is not None:
                return first, ()
            notes.append(
                f"{where}nothing differs in the first step: what differs is made by "
                "the inner compiler, or in a later step, or not where what modules "
                "return is kept"
            )
        return None, tuple(notes)


def _first_of(
    checks: list[Check], model: nn.Module, dtype: torch.dtype
) -> Difference | None:
    """Return what differs first in the order in which a step makes tensors."""
    outputs = [x.name for x in checks if x.kind == "forward"]
    in_order = sorted(checks, key=lambda x: place_of(x.kind, x.name, outputs))
    number = next((i for i, x in enumerate(in_order) if not x.ok), None)
    if number is None:
        return None
    found = in_order[number]
    path, what = described(found.kind, found.name)
    after = ""
    if number:
        before, its = described(in_order[number - 1].kind, in_order[number - 1].name)
        after = f"the {its} of {before or 'the model'}"
    return Difference(
        **dataclasses.asdict(found),
        what=what,
        path=path,
        module=type(model.get_submodule(path)).__name__,
        after=after,
        dtype=str(dtype).removeprefix("torch."),
    )


def _all_right(checks: list[Check]) -> bool:
    return all(check.ok for check in checks)


def _checked(
    model: Any, args: Any, kwargs: Any, options: Mapping[str, Any], steps: int
) -> ComparedProgram:
    """Return the program; raise InputError for what cannot be compared."""
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
    return ComparedProgram(model, args, kwargs, steps)


def _advice(
    checks: list[Check], first: Difference | None, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Suggest what to try, from what differs."""
    if _all_right(checks):
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
    elif first is not None and "att" in f"{first.path} {first.after}".lower():
        chosen = options.get("strategy")
        other = "all_gather" if chosen != "all_gather" else "ring"
        advice.append(f"options['strategy'] = {other!r}, another way to compute it")
    if options.get("layout") != "contiguous":
        advice.append("options['layout'] = 'contiguous', which moves no tokens")
    advice.append("a report of this as an issue: results have to equal one process")
    return tuple(advice)


@dataclass(frozen=True)
class Trace:
    """One step: what torch.profiler exports on every rank, and the calls.

    times: its table of the operators and spans of the first rank.
    """

    ranks: tuple[str, ...]
    explanation: Explanation
    times: str

    def to_json(self) -> str:
        """Write the step for Perfetto; the table of the calls lies in its metadata."""
        return merged(self.ranks, str(self.explanation).splitlines())


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    world: int,
    show_progress: bool = False,
) -> Trace:
    """Run a step, forward and backward, on `world` local processes, and record it.

    Raises: as cp.verify, for the same reasons.
    """
    parse_options(options)
    ranks = Ranks(world, options)
    told(show_progress)(f"compile, warm up, record on {world} ranks")
    program = ComparedProgram(model, args, kwargs, 0)
    records = ranks.run(on_rank.trace, program, options)
    texts, (times, *_), (reports, *_) = zip(*records, strict=True)
    return Trace(texts, Explanation(reports), times)
