"""What came of running a case, and how close to one process it is.

The reference is the same model on one process in float64, and bounds are those of
Note [Derived bounds]. The scale of a tensor is its largest value; of a gradient not
less than FLOOR of the largest gradient. Gradients that are zero but for noise in
float64 (a key bias, which moves no softmax) are noise in any precision, and their scale
is the largest gradient. The rough result is the model in float32 on one process: with
torch's fused attention or its plain one, whichever is farther from the exact one,
because one order of summation may be lucky; with routed experts also with the rows of
the batch in another order and by another implementation of the experts; and compiled by
Inductor alone, where a run goes through Inductor. The table has errors relative to the
scale.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.apps.verification.bounds import gradient_floor, largest
from tests.models.case import BATCH, Case
from tests.models.families.decoders import loop_over_experts, set_experts
from tests.models.float64 import in_float64
from tests.models.setting import Setting
from tests.models.steps import make_model, run_steps
from tests.models.zoo import case_of
from tests.support.bounds import deviation_where_defined


class Verdict(Enum):
    """How a run ended.

    EXACT: every result and gradient equals one process.
    REFUSED: cpcompile says that it cannot, and why.
    WRONG: a number differs, or a gradient is missing: a bug.
    CRASH: another error, or one that is no refusal and had a fallback: a bug.
    """

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    CRASH = "crash"


@dataclass(frozen=True)
class RankRun:
    """What one rank hands back; plain data, because it is pickled.

    error: (class name, text) of what was raised, and whether it is a refusal.
    calls: (path, strategy and layout, or None and why not) of all attention calls.
    mixers: the strategy of every mixer, a call or several that are one region.
    mistakes: of ours, for which there was a fallback.
    work: of all ranks over that of one device, in all calls; 0 if nothing was counted.
    gathered: bytes that a rank receives of values that a call needs whole.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    error: tuple[str, str, bool] | None = None
    trace: str = ""
    calls: tuple[tuple[str, str | None, str | None], ...] = ()
    mixers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    graphs: int = 0
    distributed: int = 0
    seconds: float = 0.0
    mistakes: int = 0
    work: float = 0.0
    gathered: int = 0


@dataclass(frozen=True)
class Outcome:
    """One run, over all ranks, as the table shows it."""

    case: str
    setting: Setting
    verdict: Verdict
    error: float = 0.0
    text: str = ""
    sharded: int = 0
    attention: int = 0
    strategies: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    not_sharded: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    graphs: int = 0
    distributed: int = 0
    seconds: float = 0.0
    work: float = 0.0
    gathered: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain data; the setting only as far as it differs from the default."""
        fields = {k: v for k, v in vars(self).items() if v or k in ("case", "error")}
        fields |= {"setting": self.setting.as_json(), "verdict": self.verdict.value}
        fields["error"] = float(f"{self.error:.1e}")
        fields["seconds"] = round(self.seconds, 1)
        if self.work:
            fields["work"] = round(self.work, 2)
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        """The outcome of a record."""
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        fields["setting"] = Setting.from_json(fields["setting"])
        return cls(**fields | {"verdict": Verdict(fields["verdict"])})


@functools.lru_cache(maxsize=4)
def reference(name: str, setting: Setting) -> tuple[dict[str, Tensor], ...]:
    """The steps on one process: in float64, in float32, and so by plain attention."""
    case = case_of(name)
    model = make_model(case)
    again = copy.deepcopy(model)
    found = [_exact(case, setting, model), run_steps(case, setting, model, model)]
    with sdpa_kernel(SDPBackend.MATH):
        found.append(run_steps(case, setting, again, again))
    if case.in_double is loop_over_experts:
        found.append(_other_order(case, setting))
    return tuple(found)


def _exact(case: Case, setting: Setting, model: Any) -> dict[str, Tensor]:
    """Run the steps in float64; a model in float32 stays as it is."""
    exact: Any = case.doubled(copy.deepcopy(model))
    try:
        return run_steps(case, setting, exact, exact, torch.float64)
    except RuntimeError:  # of two dtypes: some of it is in float32 by hand
        exact = case.doubled(copy.deepcopy(model))
        return run_steps(case, setting, exact, in_float64(exact), torch.float64)


def _other_order(case: Case, setting: Setting) -> dict[str, Tensor]:
    """Gradients in float32 with other orders of summation."""
    model: Any = make_model(case)
    set_experts(model, "batched_mm")
    found = run_steps(case, setting, model, _rows_reversed(model))
    return {name: x for name, x in found.items() if name.startswith("grad ")}


@functools.lru_cache(maxsize=2)
def rounded_otherwise(name: str, setting: Setting) -> dict[str, Tensor]:
    """The results and gradients of one process in float64, with other roundings.

    Every parameter differs in its last bit, and the rows of the batch are in another
    order. How far that leads no computation in float64 can do better than: batch norms
    of two values, as in the last stage of a small image, lose ten digits.
    """
    case = case_of(name)
    model: Any = case.doubled(make_model(case))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(parameter.nextafter(ends))
    found = run_steps(case, setting, model, _rows_reversed(model), torch.float64)
    return {name: _rows_back(name, x) for name, x in found.items()}


def _rows_back(name: str, x: Tensor) -> Tensor:
    """A result with the rows of the batch in their order; a gradient as it is."""
    of_rows = not name.startswith("grad ") and x.ndim > 0 and x.shape[0] == BATCH
    return x.flip(0) if of_rows else x


def _rows_reversed(model: Any) -> Callable[..., Any]:
    """Return the model as a function that reverses the rows of its batch."""

    def step(**given: Any) -> Any:
        other = {n: x.flip(0) if isinstance(x, Tensor) else x for n, x in given.items()}
        return model(**other)

    return step


def by_inductor(name: str, setting: Setting) -> dict[str, Tensor]:
    """The steps on one process in float32, compiled by Inductor without cpcompile.

    Its sine of a large number is less exact than that of aten.
    """
    torch._dynamo.reset()
    model = make_model(case_of(name))
    return run_steps(case_of(name), setting, model, torch.compile(model))


def judge(name: str, setting: Setting, runs: list[RankRun]) -> Outcome:
    """Compare what the ranks found with one process."""
    first = runs[0]
    outcome = _facts(name, setting, first)
    raised = [run for run in runs if run.error is not None]
    if raised:
        kind, text, refused = raised[0].error  # type: ignore[misc]  # not None here
        alike = len(raised) == len(runs) and len({run.error for run in runs}) == 1
        says_no = refused and alike and not any(run.mistakes for run in runs)
        verdict = Verdict.REFUSED if says_no else Verdict.CRASH
        few = "" if len(raised) == len(runs) else f" (on {len(raised)} ranks only)"
        return outcome(verdict=verdict, text=f"{kind}: {text}{few}")
    if count := sum(run.mistakes for run in runs):
        text = f"{count} attempts failed by a mistake in cpcompile"
        return outcome(verdict=Verdict.CRASH, text=text)
    exact, *plain = reference(name, _one_process(setting))
    if setting.double:
        plain = [exact]
    worst, mistakes = _judged(runs, exact, *plain)
    if mistakes and setting.double:
        plain.append(rounded_otherwise(name, _one_process(setting)))
        worst, mistakes = _judged(runs, exact, *plain)
    if mistakes and setting.inner == "inductor":
        plain.append(by_inductor(name, _one_process(setting)))
        worst, mistakes = _judged(runs, exact, *plain)
    verdict = Verdict.WRONG if mistakes else Verdict.EXACT
    return outcome(verdict=verdict, error=worst, text="; ".join(mistakes[:4]))


def _judged(
    runs: list[RankRun], exact: dict[str, Tensor], *plain: dict[str, Tensor]
) -> tuple[float, list[str]]:
    """The largest error on any rank, and all that is out of bounds."""
    worst, mistakes = 0.0, []
    for run in runs:
        error, found = compare(run.values, exact, *plain)
        worst = max(worst, error)
        mistakes += [x for x in found if x not in mistakes]
    return worst, mistakes


def _facts(name: str, setting: Setting, run: RankRun) -> functools.partial[Outcome]:
    sharded = [how for _, how, _ in run.calls if how is not None]
    return functools.partial(
        Outcome,
        case=name,
        setting=setting,
        sharded=len(sharded),
        attention=len(run.calls),
        strategies=tuple(dict.fromkeys(sharded)),
        mixers=run.mixers,
        not_sharded=tuple(dict.fromkeys(why for _, _, why in run.calls if why)),
        warnings=run.warnings,
        graphs=run.graphs,
        distributed=run.distributed,
        seconds=run.seconds,
        work=run.work,
        gathered=run.gathered,
    )


def _one_process(setting: Setting) -> Setting:
    """Settings of one reference are one setting, so that it is made once."""
    return Setting(mode=setting.mode, length=setting.length, batch=setting.batch)


def compare(
    got: dict[str, Tensor], exact: dict[str, Tensor], *plain: dict[str, Tensor]
) -> tuple[float, list[str]]:
    """The largest error, and what is out of bounds, worst first."""
    mistakes = [f"{n} is missing" for n in exact.keys() - got.keys()]
    # What is computed and not used has a gradient of zeros under torch.compile alone.
    more = [n for n in got.keys() - exact if not n.startswith("grad ") or got[n].any()]
    mistakes += [f"{n} is there, but not in one process" for n in more]
    sizes = [largest(x) for n, x in exact.items() if n.startswith("grad ")]
    most, worst, wrong = max(sizes, default=0.0), 0.0, []
    for name in exact.keys() & got.keys():
        value = exact[name]
        if got[name].shape != value.shape:
            have, need = list(got[name].shape), list(value.shape)
            mistakes.append(f"{name} has shape {have}, not {need}")
            continue
        floor = gradient_floor(value, most) if name.startswith("grad ") else 0.0
        rough = [each[name] for each in plain if name in each]
        found = deviation_where_defined(name, got[name], value, rough, floor)
        error = _relative(found.error, value, floor)
        if not found.is_allowed:
            wrong.append((error, str(found)))
        worst = max(worst, error)
    return worst, mistakes + [text for _, text in sorted(wrong, reverse=True)]


def _relative(error: float, exact: Tensor, floor: float) -> float:
    """To the largest finite value, or to the floor."""
    size = max(largest(exact[exact.isfinite()]), floor)
    return 0.0 if error == 0.0 else error / size if size else float("inf")
