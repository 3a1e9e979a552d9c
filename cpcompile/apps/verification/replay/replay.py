"""Find the first call whose value differs: both graphs, call by call, on real values.

    before the passes, whole tensors  ->  the value of every call, and its gradient
    after the passes, DTensors        ->  the same, compared part by part on every rank

Both start from the same inputs and, in the backward, from the same gradients, so that
one graph of several is compared by itself. The graph after the passes runs in eager on
DTensors, as AOTAutograd traces it. First in float64, where bounds are narrow; then, for
faults that only another dtype shows, as the model is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.apps.verification.bounds import FLOOR, Deviation, gradient_floor, largest
from cpcompile.apps.verification.replay.interpret import run_graph
from cpcompile.apps.verification.replay.local_values import LocalValue
from cpcompile.apps.verification.replay.stands_for import places, stands_for
from cpcompile.apps.verification.widening import widened
from cpcompile.frontend.arguments import state_name
from cpcompile.passes.graph.nodes import TOKEN_LAYOUT, fake_value
from cpcompile.passes.rewrites import CompiledGraph, NodePath, Rewrite
from cpcompile.ranks.shardings import unshard


@dataclass(frozen=True)
class Difference:
    """A node whose value, or whose gradient, is out of bounds on this rank.

    order: values before gradients, then graphs and nodes as the program computes them;
        for gradients, graphs and nodes come the other way round.
    place: in the graph before the passes; written: in the one after them.
    """

    order: tuple[int, int, int]
    place: NodePath
    written: NodePath
    is_gradient: bool
    deviation: Deviation


@dataclass
class _RecordedRun:
    """The values of one run of the graph before the passes."""

    values: dict[NodePath, Tensor] = field(default_factory=dict)
    versions: dict[NodePath, tuple[Tensor, int]] = field(default_factory=dict)
    gradients: dict[NodePath, Tensor] = field(default_factory=dict)
    results: tuple[Any, ...] = ()

    def record(self, place: NodePath, node: fx.Node, value: Any) -> None:
        """Keep a value as it is now, and its gradient when it comes."""
        if not isinstance(value, Tensor):
            return
        self.versions[place] = value, value._version
        self.values[place] = value.detach().clone()
        _on_gradient(value, lambda g: self.gradients.__setitem__(place, g))

    def is_written_later(self, place: NodePath) -> bool:
        """Tell whether the program changes the value in place after it is made."""
        value, version = self.versions[place]
        return value._version != version


class GraphReplay:
    """A compiled graph that can run call by call instead.

    Where `log.replays` is a list, every call adds what it finds; where it is None, the
    compiled graph runs.
    """

    def __init__(self, rewrite: Rewrite, compiled: CompiledGraph, log: Log) -> None:
        self.rewrite, self._compiled, self._log = rewrite, compiled, log
        self.stands_for = stands_for(rewrite)
        self.untouched = dict(places(rewrite.untouched))
        self.rewritten = dict(places(rewrite.rewritten))
        self.order = {place: i for i, place in enumerate(self.rewritten)}
        # Dynamo forgets what its inputs are.
        self.states = {p: state_name(node) for p, node in self.untouched.items()}

    def __call__(self, *args: Any) -> Any:
        """Run the compiled graph, or both graphs call by call; return the results."""
        if self._log.replays is None:
            return self._compiled(*args)
        replay = Replay(self, len(self._log.replays), self._log.wide)
        self._log.replays.append(replay)
        return replay.run(*args)


@dataclass
class Log:
    """The compiled graphs of a program, and what replays of their calls find.

    graphs: all that were compiled. replays: None lets the compiled graphs run.
    wide: whether replays run in float64, or as the model is.
    """

    graphs: list[GraphReplay] = field(default_factory=list)
    replays: list[Replay] | None = None
    wide: bool = True

    def watch(self, rewrite: Rewrite, compiled: CompiledGraph) -> CompiledGraph:
        """Put a replay in the place of a compiled graph."""
        self.graphs.append(GraphReplay(rewrite, compiled, self))
        return self.graphs[-1]


class Replay:
    """One call of a graph: both graphs on the same values."""

    def __init__(self, graph: GraphReplay, number: int, wide: bool) -> None:
        self.graph, self._number, self._wide = graph, number, wide
        self.rewrite = graph.rewrite
        self.differences: list[Difference] = []
        self._exact, self._rough = _RecordedRun(), None if wide else _RecordedRun()
        self._parts: dict[NodePath, LocalValue] = {}
        self._given: dict[int, Tensor] = {}

    def run(self, *args: Any) -> list[Any]:
        """Compare every value of both graphs; return the rewritten one's results."""
        state = torch.get_rng_state()
        for run, wide in self._runs():
            torch.set_rng_state(state)
            own = tuple(_leaf(x, wide) for x in args)
            results = run_graph(self.rewrite.untouched, own, run.record, wide)
            run.results = tuple(results)
        torch.set_rng_state(state)
        inputs = tuple(_copy(x, self._wide) for x in args)
        results = run_graph(self.rewrite.rewritten, inputs, self._compare, self._wide)
        for number, x in enumerate(results):
            _on_gradient(x, functools.partial(self._given.__setitem__, number))
        pairs = zip(results, self._dtypes(), strict=True)
        return [x if d is None else x.to(d) for x, d in pairs]

    def compare_gradients(self) -> None:
        """Compare gradients after the program's backward; on all ranks together."""
        for run, wide in self._runs():
            ends = {
                run.results[number]: self._whole_gradient(number, g, wide)
                for number, g in sorted(self._given.items())
                if run.results[number].requires_grad
            }
            if ends:
                torch.autograd.backward(list(ends), list(ends.values()))
        sizes = [largest(x) for x in self._exact.gradients.values()]
        most = max(sizes, default=0.0)
        order = self.graph.order
        for place in sorted(self._parts, key=order.__getitem__, reverse=True):
            for old in self._compared(place, self.graph.stands_for.gradients):
                exact = self._exact.gradients.get(old)
                if exact is None:
                    continue
                floor = gradient_floor(exact, most)
                rough = None if self._rough is None else self._rough.gradients.get(old)
                self._note(place, old, self._parts[place], exact, rough, floor, True)

    def _runs(self) -> list[tuple[_RecordedRun, bool]]:
        runs = [(self._exact, True)]
        return runs if self._rough is None else [*runs, (self._rough, False)]

    def _compare(self, place: NodePath, node: fx.Node, value: Any) -> None:
        """Compare a value of the rewritten graph as soon as it is made."""
        if not isinstance(value, Tensor) or place not in self.graph.stands_for.values:
            return
        axis, layout = self.rewrite.ctx.axis, node.meta.get(TOKEN_LAYOUT)
        _on_gradient(
            value,
            lambda g: self._parts.__setitem__(place, LocalValue(g, axis, layout)),
        )
        part = LocalValue(value.detach(), axis, layout)
        for old in self._compared(place, self.graph.stands_for.values):
            exact = self._exact.values.get(old)
            if exact is None:
                continue
            rough = None if self._rough is None else self._rough.values.get(old)
            self._note(place, old, part, exact, rough, self._floor(old), False)

    def _compared(
        self, place: NodePath, stands_for: dict[NodePath, tuple[NodePath, ...]]
    ) -> list[NodePath]:
        """Return the nodes that it stands for, without those that change in between."""
        return [
            old
            for old in stands_for[place]
            if old == place
            or (old in self._exact.versions and not self._exact.is_written_later(old))
        ]

    def _floor(self, old: NodePath) -> float:
        """Return the least scale of a value: a share of its largest input.

        What cancels to a small value has the errors of what it is made of.
        """
        region = old[: len(old) - len(self.graph.untouched[old].name)]
        sources = [region + x.name for x in self.graph.untouched[old].all_input_nodes]
        values = [self._exact.values[x] for x in sources if x in self._exact.values]
        sizes = [_finite_size(x) for x in values if x.is_floating_point()]
        return FLOOR * max(sizes, default=0.0)

    def _note(
        self,
        place: NodePath,
        old: NodePath,
        part: LocalValue,
        exact: Tensor,
        rough: Tensor | None,
        floor: float,
        is_gradient: bool,
    ) -> None:
        deviation = part.deviation(old, exact, rough, floor)
        if deviation is not None and not deviation.is_allowed:
            number = self.graph.order[place]
            sign = -1 if is_gradient else 1
            order = (int(is_gradient), sign * self._number, sign * number)
            self.differences.append(
                Difference(order, old, place, is_gradient, deviation)
            )

    def _whole_gradient(self, number: int, gradient: Tensor, wide: bool) -> Tensor:
        """Return the whole gradient of a result, gathered if it is sharded."""
        placement = self.rewrite.ctx.findings.outputs[number]
        if placement is not None:
            gradient = unshard(placement.wrap(gradient, self.rewrite.ctx.mesh))
        dtype = torch.float64 if wide else None
        return gradient.detach().to(dtype) if dtype else gradient.detach()

    def _dtypes(self) -> list[torch.dtype | None]:
        """Return the dtypes of the program's results; None where one is no tensor."""
        (output,) = self.rewrite.untouched.graph.find_nodes(op="output")
        values = map(fake_value, output.args[0])
        return [x.dtype if isinstance(x, Tensor) else None for x in values]


def _on_gradient(value: Any, keep: Callable[[Tensor], None]) -> None:
    if isinstance(value, Tensor) and value.requires_grad:
        value.register_hook(lambda g: keep(g.detach()))


def _leaf(x: Any, wide: bool) -> Any:
    """Make a copy that shares nothing with x, but whose gradient can be asked for."""
    if not isinstance(x, Tensor):
        return x
    leaf = x.detach().clone()
    leaf = widened(leaf) if wide else leaf
    leaf.requires_grad_(x.requires_grad)
    return leaf.clone() if x.requires_grad else leaf  # a leaf cannot be written to


def _copy(x: Any, wide: bool) -> Any:
    """Make a copy through which gradients come back to x."""
    if not isinstance(x, Tensor):
        return x
    return (widened(x) if wide else x).clone()


def _finite_size(x: Tensor) -> float:
    return largest(torch.where(x.isfinite(), x, 0.0))
