"""Check, when a program is called, that all ranks run it on the same values.

What is compared, and when, is in docs/ideas/ranks_agree.md.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from cpcompile.errors import RankMismatchError
from cpcompile.frontend.arguments import Frame, state_name
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.ranks.digests import digest, sample
from cpcompile.ranks.meetings import Meetings, is_alone, meetings_of
from cpcompile.settings import setting

# By default values are compared in the first FIRST_CALLS calls, and then in every
# EVERY_CALLS-th call.
FIRST_CALLS = 10
EVERY_CALLS = 100

# The share of the time between calls that meetings may take.
_SHARE = 0.005

_CHUNK = (
    "is it this rank's chunk of it? pass the whole, or cp.shard(whole, mesh, dim={dim})"
    "; else read the same data in the same order"
)
_PLAIN = "pass the same whole tensor on every rank"
_NUMBER = "pass the same number on every rank"
_STATE = (
    "seed alike before the model is made (torch.manual_seed) or load one checkpoint, "
    "and give the optimizers of all ranks the same settings and as many steps"
)
_SEED = "seed alike (torch.manual_seed) before the first call"

CheckRule = int | Literal["first"] | None
Program = Callable[[], Sequence[Any]]
Check = Callable[[Program, Sequence[Any]], Sequence[Any]]

# How many programs each function has, by its code and the group.
_programs: WeakKeyDictionary[CodeType, Counter[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Value:
    """A value that is the same on every rank: the input of this place.

    fix: what to do if it differs.
    """

    name: str
    fix: str
    place: int = -1
    is_state: bool = False  # a parameter or buffer


RANDOM = Value("the random state", _SEED)


@dataclass
class _Calls:
    """The calls of a program with the parameters of one module.

    compared: the last call whose values were all compared.
    digests: of the values of every later call, with its number.
    """

    module: int
    count: int = 0
    compared: int = 0
    digests: list[tuple[int, list[Tensor]]] = field(default_factory=list)


def is_due(rule: CheckRule, call: int) -> bool:
    """Tell whether values are compared in this call; the first one has number 1."""
    if rule is None:
        return call <= FIRST_CALLS or call % EVERY_CALLS == 0
    return call == 1 or (rule != "first" and call % rule == 0)


class RankCheck:
    """The check of one compiled program, made when it has just been compiled."""

    def __init__(self, ctx: Context, frame: Frame, meetings: Meetings) -> None:
        """Set up the check of a program that has just been compiled."""
        self._meetings, self._name = meetings, frame.name
        self._rule: CheckRule = setting("check_ranks")
        values = values_of(ctx, frame)
        self._inputs = [v for v in values if not v.is_state]
        self._states = [v for v in values if v.is_state]
        sequences = [
            (place, node, graph_input)
            for place, (node, graph_input) in enumerate(ctx.inputs.items())
            if graph_input.dim is not None
            or any(p.is_shard() for p in graph_input.placements)
        ]
        # Inputs whose size changes from call to call.
        self._sized = [place for place, _, _ in sequences if ctx.has_symbols]
        # The number is that of its compilation, the same on every rank.
        about = ["no gradients"] * (not ctx.backward) + [
            f"{graph_input.name or node.name} {list(fake_value(node).shape)}"
            for _, node, graph_input in sequences
            if graph_input.kind is InputKind.FULL  # shards may differ in size
            and not ctx.has_symbols
        ]
        what = f": {', '.join(about)}" if about else ""
        self._runs = f"runs {frame.name} (program {meetings.number}{what})"
        self._devices = dict.fromkeys(["cpu", ctx.mesh.device_type])
        self._draws: list[str] | None = None  # where random numbers are drawn, if known
        self._modules: Any = WeakIdKeyDictionary()
        self._modules_seen = itertools.count(1)
        self._without_module = _Calls(0)
        self._siblings = Counter[str]()
        if frame.code is not None:
            self._siblings = _programs.setdefault(frame.code, self._siblings)
        self._siblings[meetings.name] += 1
        self._met: list[tuple[float, float]] | None = []  # first meetings: begin, end
        self._is_quick = False

    def __call__(self, program: Program, args: Sequence[Any]) -> Sequence[Any]:
        """Run `program`, which reads `args`, after the check; return its results.

        Raises: RankMismatchError, before the program sends anything. Only the random
        state that a first call draws from is compared after it.
        """
        calls = self._calls_of(args)
        calls.count += 1
        reads = not _is_capturing()
        due = reads and is_due(self._rule, calls.count)
        if reads and (due or self._rule != "first"):
            calls.digests.append((calls.count, self._digests(args, whole=due)))
        action = self._action(calls, args)
        alone = self._siblings[self._meetings.name] == 1 and not self._sized
        meets = due or not (self._is_quick and alone)
        if meets:
            self._meet(action, calls, due)
        before = random_states(self._devices) if self._draws is None else []
        results = program()
        if before:
            self._look_at_random(action, before)
        if meets:
            backward = action.replace("runs", "runs the backward of", 1)

            def meet(gradients: Any) -> None:
                self._meetings.meet(backward)

            for node in _backward_nodes(results):
                node.register_prehook(meet)
        return results

    def _calls_of(self, args: Sequence[Any]) -> _Calls:
        """Return the calls so far with the parameters of the same module.

        Dynamo compiles layers that are called one by one only once.
        """
        if not self._states:
            return self._without_module
        first = args[self._states[0].place]
        if first not in self._modules:
            self._modules[first] = _Calls(next(self._modules_seen))
        calls: _Calls = self._modules[first]
        return calls

    def _digests(self, args: Sequence[Any], whole: bool) -> list[Tensor]:
        """Digest all values; or a sample of each input, for a call between others."""
        values = [*self._inputs, *self._states] if whole else self._inputs
        tensors = [args[value.place] for value in values]
        locals_ = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
        digests = [digest(x if whole else sample(x)) for x in locals_]
        # In front: how many values follow depends on the call.
        return [*map(torch.tensor, random_states(self._draws or ())), *digests]

    def _action(self, calls: _Calls, args: Sequence[Any]) -> str:
        """Name the call, and the sizes that decide on its messages."""
        text = f"{self._runs}, call {calls.count}"
        if calls.module > 1:
            text += f" of module {calls.module}"
        sizes: list[Any] = [x for x in args if isinstance(x, int | float)]
        if self._sized:
            sizes += [list(args[place].shape) for place in self._sized]
        return f"{text} with {', '.join(map(str, sizes))}" if sizes else text

    def _meet(self, action: str, calls: _Calls, due: bool) -> None:
        """Meet before a call; if its values are due, compare them, too."""
        start = time.perf_counter()
        rows = [(n, numbers(digests)) for n, digests in calls.digests] if due else []
        self._compare(action, rows, calls)
        if due:
            calls.digests.clear()
            calls.compared = calls.count
        if self._met is not None:
            self._met.append((start, time.perf_counter()))
            self._look_at_rate(action, self._met)

    def _compare(
        self, action: str, rows: Sequence[tuple[int, list[int]]], calls: _Calls
    ) -> None:
        """Meet with digests of some calls; raise for the first in which one differs."""
        texts = self._meetings.meet(action, json.dumps(rows))
        if len(set(texts)) == 1:
            return
        random = [RANDOM] * len(self._draws or ())
        values = [*random, *self._inputs, *self._states]
        for rank_rows in zip(*map(json.loads, texts), strict=True):
            text = differences(values, [digests for _, digests in rank_rows])
            if text:
                calls.digests.clear()
                module = f" of module {calls.module}" if calls.module > 1 else ""
                last = calls.compared
                since = f" (all was the same in call {last})" if last else ""
                raise RankMismatchError(
                    f"the ranks of group {self._meetings.name!r} have different values "
                    f"in call {rank_rows[0][0]} of {self._name}{module}{since}: {text}"
                )

    def _look_at_rate(self, action: str, met: list[tuple[float, float]]) -> None:
        """Find out in the first calls whether meetings slow the program down.

        Rank 0 decides for all, because ranks that meet must find each other.
        """
        if len(met) == FIRST_CALLS:
            self._met = None
            answer = "quick" if is_quick(met) else ""
            self._is_quick = bool(self._meetings.meet(action, answer)[0])

    def _look_at_random(self, action: str, before: list[int]) -> None:
        """Find out whether a first call drew random numbers: the states differ then."""
        now = random_states(self._devices)
        changed = [old != new for old, new in zip(before, now, strict=True)]
        self._draws = list(itertools.compress(self._devices, changed))
        drawn = list(itertools.compress(before, changed))
        if drawn:
            doing = f"{action}, and draws random numbers"
            self._compare(doing, [(1, drawn)], _Calls(0))


def rank_check(ctx: Context, frame: Frame, sharded: bool) -> Check:
    """Return how to call a program: by a `RankCheck` where its ranks have to agree.

    sharded: whether the graph was rewritten. If it was not, and if no input is a
    DTensor, a rank needs no other rank, and may run the program alone.
    """
    kinds = {graph_input.kind for graph_input in ctx.inputs.values()}
    talks = InputKind.DTENSOR in kinds or (
        sharded
        and bool(
            InputKind.FULL in kinds or ctx.findings.token_origins or ctx.findings.plans
        )
    )
    group = ctx.mesh.get_group(ctx.axis)
    if setting("check_ranks") == 0 or is_alone(group) or not talks:
        return lambda program, args: program()
    return RankCheck(ctx, frame, meetings_of(group))


def values_of(ctx: Context, frame: Frame) -> list[Value]:
    """Return all inputs of a graph that have the same values on every rank."""
    values = []
    for place, (node, graph_input) in enumerate(ctx.inputs.items()):
        x = fake_value(node)  # a DTensor's local part: its graph is rewritten
        kind = graph_input.kind
        if not isinstance(x, Tensor) or kind in (
            InputKind.ACTIVATION,
            InputKind.LOCAL_PART,
        ):
            continue
        distributed = kind in (InputKind.DTENSOR, InputKind.KEPT)
        if distributed and not graph_input.placements[ctx.axis].is_replicate():
            continue
        state = state_name(node)
        if state is not None or kind is InputKind.PARAMETER:
            values.append(Value(state or node.name, _STATE, place, is_state=True))
        elif not (frame.is_part and (x.is_floating_point() or x.is_complex())):
            chunk = _CHUNK.format(dim=graph_input.dim)
            fix = chunk if kind is InputKind.FULL else _PLAIN
            what = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            name = f"input {graph_input.name or node.name} ({what})"
            values.append(Value(name, fix if x.dim() else _NUMBER, place))
    return values


def differences(values: Sequence[Value], ranks: Sequence[Sequence[int]]) -> str:
    """Say what differs, at most three names, and what to do; "" if nothing differs.

    ranks: the digests of the first values, on every rank.
    """
    texts, fixes = [], []
    for value, digests in zip(values, zip(*ranks, strict=True), strict=False):
        first: dict[int, int] = {}
        for rank, number in enumerate(digests):
            first.setdefault(number, rank)
        if len(first) > 1:
            has = [f"rank {r} has {_short(number)}" for number, r in first.items()]
            texts.append(f"{value.name}: {', '.join(has)}")
            fixes.append(value.fix)
    if not texts:
        return ""
    more = [f"and {len(texts) - 3} more"] if len(texts) > 3 else []
    what = "; ".join(texts[:3] + more)
    return f"{what}; needed the same on every rank: {'; '.join(dict.fromkeys(fixes))}"


def _short(number: int) -> str:
    return f"{zlib.crc32(str(number).encode()):08x}"


def numbers(digests: Sequence[Tensor]) -> list[int]:
    """Return all digests as numbers, with one look at each device."""
    found: list[int] = [0] * len(digests)
    for device in {x.device for x in digests}:
        places = [i for i, x in enumerate(digests) if x.device == device]
        values = torch.stack([digests[i] for i in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def random_states(devices: Iterable[str]) -> list[int]:
    """Digest the state of each device's generator; no device is waited for."""
    modules = [torch if d == "cpu" else torch.get_device_module(d) for d in devices]
    return [zlib.crc32(module.get_rng_state().numpy()) for module in modules]


def is_quick(met: Sequence[tuple[float, float]]) -> bool:
    """Tell whether two meetings a call, forward and backward, take too long.

    met: when meetings began and ended; the first two wait for what compiles.
    """
    interval = (met[-1][1] - met[2][0]) / (len(met) - 2)
    return 2 * min(end - start for start, end in met) > _SHARE * interval


def _is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured, in which nothing can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _backward_nodes(results: Iterable[Any]) -> Iterator[torch.autograd.graph.Node]:
    """Return the nodes of AOTAutograd's backward, of results or through their views."""
    frontier = {x.grad_fn for x in results if isinstance(x, Tensor)}
    for _ in range(3):
        nodes = {node for node in frontier if node is not None}
        programs = {n for n in nodes if n.name().startswith("CompiledFunction")}
        if programs:
            return iter(programs)
        frontier = {after for node in nodes for after, _ in node.next_functions}
    return iter(())
