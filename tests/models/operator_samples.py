"""torch's own samples of its operators, with one dimension cut over the ranks.

A sample of `op_db` becomes a program of one line, such as

    def forward(x0, x1): return op(x0 * 1, x1, dim=0)

in which what is cut is an intermediate. A cut says which inputs carry the sequence, and
in which dimension: (("x0", 1),). Every rank compares results and gradients with one
process, which is itself in eager.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

import cpcompile as cp
from cpcompile import errors
from cpcompile.apps.verification.bounds import (
    ROUNDINGS,
    TIMES,
    error_where_defined,
    scale_of,
)
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.run_case import gathered_bytes, short, warnings_of

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
# What these give is whatever was in memory: only shapes are compared.
UNDEFINED = ("empty", "new_empty", "resize_")
_NOT_THERE = errors.RankMismatchError
_PLACE = re.compile(r" at <top level> \(File [^)]*\)| at <sample>:\d+")
_SIZE_NAMES = "abcdefghijklmnopqrstuvwxyz"
_LONGEST = 300  # characters of a text in the record

Cut = tuple[tuple[str, int], ...]


class SampleVerdict(Enum):
    """What came of one case.

    EXACT: results and gradients equal one process.
    GATHERED: the same, and a warning or an account says that something was gathered.
    RANDOM: an operator that draws, and draws otherwise than one process.
    REFUSED: with strict=True cpcompile says that it cannot, and why; with strict=False
        results are exact.
    TORCH: torch alone fails, in eager or by aot_eager, or differs from itself.
    WRONG: a number, shape or dtype differs: a bug.
    CRASH: any other error, no answer, or ranks that disagree: a bug.
    """

    EXACT = "exact"
    GATHERED = "gathered"
    RANDOM = "random"
    REFUSED = "refused"
    TORCH = "torch"
    WRONG = "wrong"
    CRASH = "crash"


BUGS = (SampleVerdict.WRONG, SampleVerdict.CRASH)


@dataclass(frozen=True)
class CutSample:
    """A sample of an operator, by its number among all samples, and a cut."""

    operator: str
    dtype: str
    sample: int
    cut: Cut

    def __str__(self) -> str:
        cut = ",".join(f"{name}.{dim}" for name, dim in self.cut)
        return f"{self.operator}/{self.dtype}/{self.sample}/{cut}"

    @classmethod
    def of(cls, text: str) -> CutSample:
        """Read what `str` has written."""
        operator, dtype, sample, cut = text.rsplit("/", 3)
        pairs = [part.split(".") for part in cut.split(",")]
        return cls(operator, dtype, int(sample), tuple((n, int(d)) for n, d in pairs))


@dataclass(frozen=True)
class SampleAnswer:
    """What one rank found; plain data, because it is pickled.

    seconds: of the processor, to compile by the backend and run.
    """

    verdict: SampleVerdict
    text: str = ""
    seconds: float = 0.0
    call: str = ""
    graphs: int = 0


@functools.cache
def operators() -> dict[str, Any]:
    """Return the entries of op_db by their names, with those of their variants."""
    # Takes some seconds, and ranks alone need it.
    from torch.testing._internal import common_methods_invocations as torch_samples

    # It sets a seed, at which Dynamo breaks the graph; `values_of` sets one instead.
    torch_samples.wrapper_set_seed = _without_a_seed
    entries: dict[str, Any] = {}
    for entry in torch_samples.op_db:
        name = f"{entry.name}-{entry.variant_test_name}".rstrip("-").replace("/", "_")
        while name in entries:
            name += "+"
        entries[name] = entry
    return entries


def _without_a_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def dtypes_of(name: str) -> list[str]:
    """Return the dtypes of an operator that are worth a sweep, the first one first."""
    supported = operators()[name].supported_dtypes("cpu")
    names = [str(x).removeprefix("torch.") for x in DTYPES if x in supported]
    return [x for x in names if x != "float32" or names == ["float32"]]


class SampleProgram:
    """One sample as a function of its tensors.

    call: as one line of source. tensors: by the names of the arguments.
    """

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        self._function = function
        self._constants: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        arguments = [self._render(x) for x in (sample.input, *sample.args)]
        named = [f"{k}={self._render(x)}" for k, x in sample.kwargs.items()]
        self.call = f"op({', '.join([*arguments, *named])})"

    def _render(self, value: Any) -> str:
        if isinstance(value, Tensor):
            for name, x in self.tensors.items():
                if x is value:
                    return name
            name = f"x{len(self.tensors)}"
            self.tensors[name] = value
            return name
        if isinstance(value, float) and value - value != 0.0:
            return f"float({str(value)!r})"
        if type(value) in (bool, int, float, complex, str, type(None)):
            return repr(value)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return str(value)
        if value is Ellipsis:
            return "..."
        if type(value) is slice:
            parts = map(self._render, (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
            items = [self._render(x) for x in value]
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        if type(value) is list:
            return f"[{', '.join(map(self._render, value))}]"
        if type(value) is dict:
            items = [f"{k!r}: {self._render(x)}" for k, x in value.items()]
            return f"{{{', '.join(items)}}}"
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def source(self, cut: Cut = ()) -> str:
        """Return the source of `forward`, where what is cut is an intermediate."""
        lines = [f"def forward({', '.join(self.tensors)}):"]
        for name, _ in cut:
            is_bool = self.tensors[name].dtype is torch.bool
            copied = ".clone()" if is_bool else " * 1"
            lines.append(f"    {name} = {name}{copied}")
        return "\n".join([*lines, f"    return {self.call}", ""])

    def forward(self, cut: Cut) -> Callable[..., Any]:
        """Return a fresh function, of which nothing is compiled yet."""
        names = {"op": self._function, "torch": torch, **self._constants}
        names["__name__"] = "sample_of_operator"
        exec(compile(self.source(cut), "<sample>", "exec"), names)
        function: types.FunctionType = names["forward"]
        return function

    def signature(self) -> str:
        """Return the call and its shapes; equal sizes are letters, even ones marked."""
        letters: dict[int, str] = {}

        def size(n: int) -> str:
            if n < 2:
                return str(n)
            letter = letters.setdefault(n, _SIZE_NAMES[len(letters) % 26])
            return letter if n % 2 else f"{letter}'"

        shapes = [
            f"{str(x.dtype).removeprefix('torch.')}[{' '.join(map(size, x.shape))}]"
            f"{'' if x.layout is torch.strided and x.is_contiguous() else '~'}"
            f"{'g' if x.requires_grad else ''}"
            for x in self.tensors.values()
        ]
        return f"{re.sub(r'[0-9]+[.][0-9]+', 'f', self.call)} {' '.join(shapes)}"

    def cuts(self) -> Iterator[Cut]:
        """Yield what may be cut: like inputs together, then each alone."""
        strided = {n: x for n, x in self.tensors.items() if x.layout is torch.strided}
        for together in (True, False):
            for number, (name, x) in enumerate(strided.items()):
                alike = [n for n, y in strided.items() if y.shape == x.shape]
                if together and (name != alike[0] or (number and len(alike) == 1)):
                    continue
                if not together and len(alike) == 1 and not number:
                    continue
                for dim in range(x.ndim):
                    if x.shape[dim] >= 2:
                        chosen = alike if together else [name]
                        yield tuple((n, dim) for n in chosen)

    def described(self, cut: Cut) -> str:
        """Return the call with its shapes, for a reader of the record."""
        shapes = [
            f"{n} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            for n, x in self.tensors.items()
        ]
        return f"{self.call}; {', '.join(shapes)}"


def programs(name: str, dtype: str) -> Iterator[SampleProgram]:
    """Yield the samples of an operator, always the same ones in the same order."""
    entry, wanted = operators()[name], getattr(torch, dtype)
    gradients = entry.supports_autograd and wanted in entry.supported_backward_dtypes(
        "cpu"
    )
    _seed(0)
    warnings.simplefilter("ignore")  # of torch, about its own samples
    for sample in entry.sample_inputs("cpu", wanted, requires_grad=gradients):
        yield SampleProgram(entry.op, sample)


def distinct(name: str, dtype: str) -> Iterator[tuple[int, SampleProgram]]:
    """Yield the samples that can be cut, each signature once, with their numbers."""
    signatures = set()
    for number, program in enumerate(programs(name, dtype)):
        if any(True for _ in program.cuts()):
            signature = program.signature()
            if signature not in signatures:
                signatures.add(signature)
                yield number, program


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def values_of(
    forward: Callable[..., Any], tensors: dict[str, Tensor], seed: int = 1
) -> dict[str, Any]:
    """Return all results, and the gradients of inputs for cotangents of fixed seed."""
    leaves = _copied(tensors)
    _seed(seed)
    results = pytree.tree_leaves(forward(**leaves))
    values: dict[str, Any] = {}
    roots, cotangents = [], []
    generator = torch.Generator().manual_seed(0)
    for number, x in enumerate(results):
        if not isinstance(x, Tensor):
            values[f"result {number}"] = x
            continue
        values[f"result {number}"] = x.detach().clone()
        if x.requires_grad:
            roots.append(x)
            cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            cotangents.append(cotangent.to(x.dtype))
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    if roots and wanted:
        gradients = torch.autograd.grad(
            roots, list(wanted.values()), cotangents, allow_unused=True
        )
        for n, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                values[f"grad of {n}"] = gradient.detach()
    return values


def _copied(tensors: dict[str, Tensor], gradients: bool = True) -> dict[str, Tensor]:
    return {
        n: x.detach().clone().requires_grad_(x.requires_grad and gradients)
        for n, x in tensors.items()
    }


def _reference(program: SampleProgram, cut: Cut) -> dict[str, Any]:
    """Return what one process gives; without gradients where torch has none."""
    try:
        return values_of(program.forward(cut), program.tensors)
    except Exception:  # of the backward, or of the forward: then it raises again
        program.tensors = _copied(program.tensors, gradients=False)
        return values_of(program.forward(cut), program.tensors)


def _plain(x: Tensor) -> Tensor:
    """A dense tensor of real numbers, in float64 if it has a fraction."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.dequantize()
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.double() if x.is_floating_point() else x


def differences(
    got: dict[str, Any],
    wanted: dict[str, Any],
    rounded: Callable[[], dict[str, Any] | None],
    shapes_alone: bool = False,
) -> list[str]:
    """Name what differs from one process.

    rounded: makes what one process gives for inputs that differ in their last bits.
    """
    found = []
    other: dict[str, Any] | None = None
    for name in dict.fromkeys([*wanted, *got]):
        if name not in got or name not in wanted:
            value = got.get(name, wanted.get(name))
            if name.startswith("grad") and not bool(_plain(value).any()):
                continue
            found.append(f"{name} is {'missing' if name not in got else 'too much'}")
            continue
        have, need = got[name], wanted[name]
        if not isinstance(need, Tensor) or not isinstance(have, Tensor):
            if not _same_object(have, need):
                found.append(f"{name} is {have!r:.60}, not {need!r:.60}")
            continue
        if (have.dtype, have.shape) != (need.dtype, need.shape):
            found.append(
                f"{name} is {have.dtype}{list(have.shape)}, "
                f"not {need.dtype}{list(need.shape)}"
            )
            continue
        if shapes_alone:
            continue
        error, scale, eps = _error(have, need)
        if error <= ROUNDINGS * eps * scale:
            continue
        other = (rounded() or {}) if other is None else other
        noise = 0.0
        if isinstance(other.get(name), Tensor) and other[name].shape == need.shape:
            noise = _error(other[name], need)[0]
        if not error <= ROUNDINGS * eps * scale + TIMES * noise:
            found.append(f"{name} differs by {error:.2g} of {scale:.2g}")
    return found


def _error(have: Tensor, need: Tensor) -> tuple[float, float, float]:
    """Return the largest error, the scale, and eps of the dtype."""
    fractions = need.is_floating_point() or need.is_complex()
    eps = torch.finfo(need.dtype).eps if fractions else 0.0
    x, y = _plain(have), _plain(need)
    if not fractions:
        return float((x != y).sum().item()), 0.0, eps
    error = error_where_defined(x, y)
    return (torch.inf if math.isnan(error) else error), scale_of(y, 0.0), eps


def _same_object(have: Any, need: Any) -> bool:
    if isinstance(need, int | float | complex) and isinstance(have, type(need)):
        return have == need or abs(have - need) <= 1e-12 * abs(need) or need != need
    try:
        return bool(have == need)
    except Exception:  # of an object that cannot be compared
        return type(have) is type(need)


def _nudged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with other last bits."""
    generator = torch.Generator().manual_seed(0)

    def nudge(x: Tensor) -> Tensor:
        if x.layout is not torch.strided or not (
            x.is_floating_point() or x.is_complex()
        ):
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        eps = torch.finfo(x.dtype).eps
        nudged = x.detach() * (1 + eps * signs)
        return nudged.to(x.dtype).requires_grad_(x.requires_grad)

    return {n: nudge(x) for n, x in tensors.items()}


def in_step() -> bool:
    """Tell whether the ranks still answer each other, after a case that failed."""
    total = torch.ones(3)
    dist.all_reduce(total)
    return bool((total == dist.get_world_size()).all())


@functools.lru_cache(maxsize=1)
def _sample(name: str, dtype: str, number: int) -> SampleProgram:
    return next(itertools.islice(programs(name, dtype), number, None))


def run_on_rank(case: CutSample, timeout: float = 10.0) -> SampleAnswer:
    """Compile one case by the backend and compare; called on every rank."""
    torch._dynamo.reset()
    program = _sample(case.operator, case.dtype, case.sample)
    call = program.described(case.cut)
    eager = program.forward(case.cut)
    try:
        wanted = _reference(program, case.cut)
        again = values_of(eager, program.tensors)
        other = values_of(eager, program.tensors, seed=2)
    except Exception as error:  # whatever torch raises
        return SampleAnswer(SampleVerdict.TORCH, f"eager: {_text(error)}", call=call)
    undefined = case.operator.startswith(UNDEFINED) or bool(
        differences(again, wanted, dict)
    )
    draws = bool(differences(other, wanted, dict))

    def rounded() -> dict[str, Any] | None:
        try:
            return values_of(eager, _nudged(program.tensors))
        except Exception:  # an input that is no longer what the operator needs
            return None

    def differing(got: dict[str, Any]) -> str:
        return "; ".join(differences(got, wanted, rounded, undefined)[:3])

    def attempt(strict: bool) -> tuple[Exception | None, str, list[str], list[Any]]:
        torch._dynamo.reset()
        warn_once.cache_clear()
        options = {
            "mesh": sequence_mesh(2),
            "shard": dict(case.cut),
            "inner": "aot_eager",
            "strict": strict,
        }
        compiled = torch.compile(
            program.forward(case.cut), backend="cp", options=options
        )
        with warnings_of() as said, recording() as reports:
            try:
                with cp.config.patch(hardware="cpu", agreement_timeout_seconds=timeout):
                    got = values_of(compiled, program.tensors)
            except Exception as error:  # whatever an operator makes torch raise
                return getattr(error, "inner_exception", None) or error, "", [], []
        unique = {id(r): r for r in reports}
        return None, differing(got), list(said), list(unique.values())

    start = time.process_time()
    error, differs, said, reports = attempt(strict=True)
    seconds = time.process_time() - start
    answer = functools.partial(
        SampleAnswer, seconds=seconds, call=call, graphs=len(reports)
    )
    if error is None and not differs:
        accounts = [a for report in reports for a in report.accounts]
        if said:
            return answer(SampleVerdict.GATHERED, _PLACE.sub("", said[0])[:_LONGEST])
        if gathered_bytes(accounts):
            return answer(SampleVerdict.GATHERED)
        return answer(SampleVerdict.EXACT)
    problem = _by_torch_alone(program, case.cut, differing)
    if problem is not None:
        return answer(SampleVerdict.TORCH, f"aot_eager: {problem}")
    if error is None:
        verdict = SampleVerdict.RANDOM if draws else SampleVerdict.WRONG
        return answer(verdict, differs)
    text = _text(error)
    if not isinstance(error, errors.CPError) or isinstance(error, _NOT_THERE):
        return answer(SampleVerdict.CRASH, text)
    error, differs, _, _ = attempt(strict=False)
    if error is not None:
        return answer(SampleVerdict.CRASH, f"strict=False: {_text(error)}")
    if differs and not draws:
        return answer(SampleVerdict.WRONG, f"strict=False: {differs}")
    return answer(SampleVerdict.REFUSED, text)


def _by_torch_alone(
    program: SampleProgram, cut: Cut, differing: Callable[[dict[str, Any]], str]
) -> str | None:
    """Return what is wrong where torch compiles the same function alone, or None."""
    torch._dynamo.reset()
    try:
        alone = torch.compile(program.forward(cut), backend="aot_eager")
        return differing(values_of(alone, program.tensors)) or None
    except Exception as error:  # whatever torch raises
        return _text(error)


def _text(error: Exception) -> str:
    text = short(str(error))
    return f"{type(error).__name__}: {_PLACE.sub('', text)}"[:_LONGEST]


def joined(answers: Sequence[SampleAnswer]) -> SampleAnswer:
    """Return what all ranks found; the worst verdict, and a crash if they differ."""
    order = list(SampleVerdict)
    worst = max(answers, key=lambda x: order.index(x.verdict))
    slowest = max(x.seconds for x in answers)
    verdicts = {x.verdict for x in answers}
    verdict, text = worst.verdict, worst.text
    if len(verdicts) > 1 and verdict is SampleVerdict.REFUSED:
        words = ", ".join(x.verdict.value for x in answers)
        verdict, text = SampleVerdict.CRASH, f"ranks differ ({words}): {text}"
    return SampleAnswer(verdict, text, slowest, worst.call, worst.graphs)
