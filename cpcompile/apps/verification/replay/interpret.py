"""Run a graph call by call in eager, and show every value to a recorder.

In float64 every conversion to a narrower floating-point dtype is one to float64, so
that nothing rounds and a faulty call stands out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from cpcompile.apps.verification.bounds import default_dtype
from cpcompile.apps.verification.widening import (
    wide_dtype,
    wide_function,
    wide_method,
    widened,
)
from cpcompile.passes.graph.nodes import CHECKPOINT
from cpcompile.passes.rewrites import NodePath

Recorder = Callable[[NodePath, fx.Node, Any], None]


def run_graph(
    gm: fx.GraphModule, args: tuple[Any, ...], record: Recorder, wide: bool
) -> Any:
    """Run the graph, return its results; `wide`: in float64, with float64 arguments."""
    dtype = torch.float64 if wide else torch.get_default_dtype()
    with default_dtype(dtype):
        return _Interpreter(gm, record, wide).run(*args)


class _Interpreter(fx.Interpreter):
    def __init__(
        self, gm: fx.GraphModule, record: Recorder, wide: bool, region: NodePath = ""
    ) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._record, self._wide, self._region = record, wide, region
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        result = super().run_node(n)
        self._record(self._region + n.name, n, result)
        return result

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if target is CHECKPOINT:
            assert self._node is not None, "a call has a node"
            region, *region_args = args
            inside = f"{self._region}{self._node.name}/"
            return _Interpreter(region, self._record, self._wide, inside).run(
                *region_args
            )
        target = wide_function(target) if self._wide else target
        return super().call_function(target, *self._widened(args, kwargs))

    def call_method(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        target = wide_method(target) if self._wide else target
        return super().call_method(target, *self._widened(args, kwargs))

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return widened(value) if self._wide else value

    def _widened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if not self._wide:
            return args, kwargs
        wide_args, wide_kwargs = fx.node.map_aggregate((args, kwargs), wide_dtype)
        return wide_args, wide_kwargs
