"""Find the call of a sharded graph that AOTAutograd could not trace.

AOTAutograd raises whatever DTensor raises, in the forward or in the backward of some
call, and does not say in which. So the graph is run once more on fake tensors, node by
node: every node of autograd is known by the call that made it, and the last one that
began when the error comes is the one. Nothing of this runs where nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.errors import RewriteError, TraceError
from cpcompile.passes.flow.reasons import in_words
from cpcompile.passes.flow.trial_backward import first_line
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.cp_attention import is_cp_attention
from cpcompile.passes.graph.nodes import (
    attribute_value,
    fake_mode_of,
    fake_value,
    sub_graph,
    where,
)
from cpcompile.passes.graph.origins import origin
from cpcompile.refusals import check_refusal
from cpcompile.torch_patches import lost_writes, tracing
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

# Where AOTAutograd runs the graph, by the names of modules of torch 2.13 and 2.15. The
# inner compiler comes later: what it raises is its own matter.
_TRACING = {
    "torch._functorch._aot_autograd.collect_metadata_analysis",
    "torch._functorch._aot_autograd.graph_capture",
}


@contextmanager
def named(gm: fx.GraphModule, ctx: Context, name: str) -> Iterator[None]:
    """Turn errors of AOTAutograd's tracing of `gm` into errors that name the call.

    Raises: TraceError, if the call can be computed on gathered tensors instead;
    else RewriteError; what is raised later as it is.
    """
    try:
        yield
    except Exception as error:  # AOTAutograd raises what the rules of DTensor raise
        if not _is_tracing(error):
            raise
        check_refusal(error, f"the trace of {name}")
        node, direction = failing_call(gm, ctx.backward)
        problem = in_words(f"{type(error).__name__}: {first_line(error)}")
        if node is None:
            raise RewriteError(
                f"AOTAutograd cannot trace the sharded graph of {name} ({problem}), "
                "and the call that it fails at is not found"
            ) from error
        text = f"its {direction} fails: {problem}"
        call = origin(node)
        if call is None or is_cp_attention(node):
            raise RewriteError(
                f"{node.name} at {where(node)} cannot be traced on sharded tensors; "
                f"{text}"
            ) from error
        name = call.rpartition("/")[2]  # of the user's call
        raise TraceError(f"{name} at {where(node)}", call, text) from error


def _is_tracing(error: Exception) -> bool:
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") in _TRACING:
            return True
        frame = frame.tb_next
    return False


def failing_call(gm: fx.GraphModule, backward: bool) -> tuple[fx.Node | None, str]:
    """Return the node at which `gm` raises on fake tensors, and in which direction.

    The direction is "forward" or "backward". The node is None if nothing is raised.
    """
    run = _WatchedInterpreter(gm)
    inputs = [_leaf(fake_value(x)) for x in gm.graph.find_nodes(op="placeholder")]
    with (
        _autocast_kept(),
        torch.set_grad_enabled(backward),
        torch.autograd.set_detect_anomaly(False),
        tracing.plain_means_replicated(),
        lost_writes.LostWrites(),
        fake_mode_of(gm.graph),
        enable_python_dispatcher(),
    ):
        direction = "forward"
        try:
            results = [
                x
                for x in pytree.tree_leaves(run.run(*inputs))
                if isinstance(x, Tensor) and x.requires_grad
            ]
            run.running, direction = None, "backward"
            leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            if results and leaves:
                tangents = [torch.empty_like(x) for x in results]
                torch.autograd.grad(results, leaves, tangents, allow_unused=True)
        except Exception:  # the one that AOTAutograd met
            return run.running, direction
    return None, ""


class _WatchedInterpreter(fx.Interpreter):
    """An interpreter; `running` is the node that runs, forward or backward."""

    def __init__(
        self, gm: fx.GraphModule, outer: _WatchedInterpreter | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.outer = outer or self
        self.running: fx.Node | None = None
        self.known: set[Any] = set()  # nodes of autograd

    def run_node(self, n: fx.Node) -> Any:
        outer = self.outer
        outer.running = n
        region = sub_graph(n)
        if n.op == "get_attr":
            value = attribute_value(n)
            return super().run_node(n) if value is None else value
        if region is None:
            result = super().run_node(n)
        else:
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = _WatchedInterpreter(region, outer).run(*args[1:])
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                outer.claim(x.grad_fn, n)
        return result

    def claim(self, root: Any, by: fx.Node) -> None:
        """Remember that `by` has made these nodes of autograd, if they are new."""

        def begins(*_: Any) -> None:
            self.running = by

        pending = [root]
        while pending:
            node = pending.pop()
            if node is None or node in self.known:
                continue
            self.known.add(node)
            node.register_prehook(begins)
            pending += [parent for parent, _ in node.next_functions]


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@contextmanager
def _autocast_kept() -> Iterator[None]:
    """Restore autocast after a graph that enters it, and raises."""
    before = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    }
    cached = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        for device, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
