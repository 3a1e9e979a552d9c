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
from types import CodeType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cpcompile.frontend.arguments import Frame
from cpcompile.frontend.rank_consistency.compared_values import (
    RANDOM,
    Number,
    Value,
    complete,
    differences,
    fixes,
    numbers,
    random_states,
    sampled,
    values_of,
)
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.ranks.call_rate import CallRate
from cpcompile.ranks.rendezvous import Rendezvous, rendezvous_of
from cpcompile.ranks.text_exchange import is_alone
from cpcompile.settings import setting

# By default values are compared in the first FIRST_CALLS calls, and then in every
# EVERY_CALLS-th call.
FIRST_CALLS = 10
EVERY_CALLS = 100

CheckRule = int | Literal["first"] | None

# How many programs each function has, by its code and the group.
_programs: WeakKeyDictionary[CodeType, Counter[str]] = WeakKeyDictionary()


def is_due(rule: CheckRule, call: int) -> bool:
    """Tell whether values are compared in this call; the first one has number 1."""
    if rule is None:
        return call <= FIRST_CALLS or call % EVERY_CALLS == 0
    return call == 1 or (rule != "first" and call % rule == 0)


class _Calls:
    """The calls of a program with the parameters of one module."""

    def __init__(self, module: int) -> None:
        self.module = module
        self.count = 0
        self.compared = 0  # the last call whose values were all compared
        # Digests of the inputs of later calls, and the numbers of these calls.
        self.inputs: list[tuple[int, list[Number]]] = []


class RankCheck:
    """The check of one compiled program, made when it has just been compiled."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        values: Sequence[Value],
        rule: CheckRule,
        frame: Frame,
        device_type: str,
        what: str,
        sized: Sequence[int],
    ) -> None:
        """Set up the check of a program that has just been compiled.

        Args:
            values: the inputs that are the same on every rank.
            rule: the setting check_ranks.
            device_type: of the mesh.
            what: tells the program from others of its function, for the user.
            sized: the inputs whose size changes from call to call.
        """
        self._rendezvous, self._rule, self._sized = rendezvous, rule, sized
        self._inputs = [v for v in values if not v.is_state]
        self._values = [*self._inputs, *(v for v in values if v.is_state)]
        self._name = frame.name
        self._program = rendezvous.number  # its compilation's, the same on every rank
        self._runs = f"runs {frame.name} (program {self._program}{what})"
        self._devices = dict.fromkeys(["cpu", device_type])
        self._draws: list[str] | None = None  # where random numbers are drawn, if known
        self._modules: Any = WeakIdKeyDictionary()
        self._modules_seen = itertools.count(1)
        self._without_module = _Calls(0)
        self._siblings = Counter[str]()
        if frame.code is not None:
            self._siblings = _programs.setdefault(frame.code, self._siblings)
        self._siblings[rendezvous.name] += 1
        self._call_rate = CallRate()

    def __call__(
        self, program: Callable[[], Sequence[Any]], args: Sequence[Any]
    ) -> Sequence[Any]:
        """Run `program`, which reads `args`, after the check; return its results.

        Raises: RankMismatchError, before the program sends anything. Only the random
        state that a first call draws from is compared after it.
        """
        calls = self._calls_of(args)
        calls.count += 1
        values = not _is_capturing()
        due = values and is_due(self._rule, calls.count)
        random = random_states(self._draws or ())
        if values and not due and self._rule != "first":
            calls.inputs.append((calls.count, [*sampled(self._inputs, args), *random]))
        alone = self._siblings[self._rendezvous.name] == 1 and not self._sized
        action = self._action(calls, args)
        asked = due or not (self._call_rate.is_quick and alone)
        if due:
            self._compare(action, calls, [*complete(self._values, args), *random])
        elif asked:
            self._meet(action)
        before = random_states(self._devices) if self._draws is None else []
        results = program()
        if before:
            self._look_at_random(action, before)
        if asked:
            backward = action.replace("runs", "runs the backward of", 1)
            for node in _backward_nodes(results):
                node.register_prehook(lambda gradients: self._rendezvous.meet(backward))
        return results

    def _calls_of(self, args: Sequence[Any]) -> _Calls:
        """Return the calls so far with the parameters of the same module.

        Dynamo compiles layers that are called one by one only once.
        """
        if len(self._inputs) == len(self._values):
            return self._without_module
        first = args[self._values[len(self._inputs)].place]
        if first not in self._modules:
            self._modules[first] = _Calls(next(self._modules_seen))
        calls: _Calls = self._modules[first]
        return calls

    def _action(self, calls: _Calls, args: Sequence[Any]) -> str:
        """Name the call, and the sizes that decide on its messages."""
        text = f"{self._runs}, call {calls.count}"
        if calls.module > 1:
            text += f" of module {calls.module}"
        sizes: list[Any] = [x for x in args if isinstance(x, int | float)]
        if self._sized:
            sizes += [list(args[place].shape) for place in self._sized]
        return f"{text} with {', '.join(map(str, sizes))}" if sizes else text

    def _compare(self, action: str, calls: _Calls, now: list[Number]) -> None:
        """Meet with digests of this call, and of the inputs of the calls before it."""
        earlier = [[n, numbers(digests)] for n, digests in calls.inputs]
        mine = json.dumps([*earlier, [calls.count, numbers(now)]])
        calls.inputs.clear()
        self._meet(
            action,
            str(zlib.crc32(mine.encode())),
            lambda: mine,
            lambda all_seen: self._text(calls, [json.loads(x) for x in all_seen]),
        )
        calls.compared = calls.count

    def _meet(
        self,
        action: str,
        values: str = "",
        details: Callable[[], str] | None = None,
        compare: Callable[[list[str]], str] | None = None,
    ) -> None:
        key = f"quick/{self._program}"
        deciding = self._call_rate.calls == FIRST_CALLS - 1
        if deciding:  # for all, because those that ask must find each other
            self._rendezvous.publish(
                key, "yes" if self._call_rate.seems_quick() else ""
            )
        start = time.perf_counter()
        self._rendezvous.meet(action, values, details, compare)
        self._call_rate.add(start, time.perf_counter())
        if deciding:
            self._call_rate.is_quick = bool(self._rendezvous.published(key))

    def _look_at_random(self, action: str, before: list[int]) -> None:
        """Find out whether a first call drew random numbers: the states differ then."""
        now = random_states(self._devices)
        changed = [old != new for old, new in zip(before, now, strict=True)]
        self._draws = list(itertools.compress(self._devices, changed))
        drawn = list(itertools.compress(before, changed))
        if not drawn:
            return
        self._rendezvous.meet(
            f"{action}, and draws random numbers",
            str(drawn),
            lambda: json.dumps(drawn),
            lambda texts: self._differ_text(
                1, differences([RANDOM] * len(drawn), [json.loads(x) for x in texts])
            ),
        )

    def _text(
        self, calls: _Calls, rank_calls: list[list[tuple[int, list[int]]]]
    ) -> str:
        """Name the first call in which something differs, from what all ranks have."""
        for row in zip(*rank_calls, strict=True):
            number = row[0][0]
            values = self._values if number == calls.count else self._inputs
            names = [*(value.name for value in values), RANDOM, RANDOM]
            length = len(row[0][1])
            texts = differences(names[:length], [digests for _, digests in row])
            if texts:
                break
        last = calls.compared
        since = f" (all was the same in call {last})" if last else ""
        return self._differ_text(number, texts, since, calls.module)

    def _differ_text(
        self, call: int, texts: list[str], since: str = "", module: int = 0
    ) -> str:
        which = f" of module {module}" if module > 1 else ""
        return (
            f"the ranks of group {self._rendezvous.name!r} have different values in "
            f"call {call} of {self._name}{which}{since}: {'; '.join(texts)}; needed "
            f"the same on every rank: {fixes(self._values, texts)}"
        )


Check = Callable[[Callable[[], Sequence[Any]], Sequence[Any]], Sequence[Any]]


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
    rule: CheckRule = setting("check_ranks")
    if rule == 0 or is_alone(group) or not talks:
        return lambda program, args: program()
    sequences = [
        (place, node, graph_input)
        for place, (node, graph_input) in enumerate(ctx.inputs.items())
        if graph_input.dim is not None
        or any(p.is_shard() for p in graph_input.placements)
    ]
    what = ["no gradients"] * (not ctx.backward)
    if not ctx.has_symbols:
        what += [
            f"{graph_input.name or node.name} {list(fake_value(node).shape)}"
            for _, node, graph_input in sequences
            if graph_input.kind is InputKind.FULL  # shards may differ in size
        ]
    return RankCheck(
        rendezvous_of(group),
        values_of(ctx, frame),
        rule,
        frame,
        ctx.mesh.device_type,
        f": {', '.join(what)}" if what else "",
        [] if not ctx.has_symbols else [place for place, _, _ in sequences],
    )


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
