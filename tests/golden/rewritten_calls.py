"""Runs the passes that read attention calls, and the graph that they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.passes.graph.context import Findings
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.normalize.fold_kv_repeat import fold_kv_repeat
from tests.golden.golden_text import golden_text
from tests.support.bounds import assert_close

READERS = (find_attention, fold_kv_repeat)


@dataclass(frozen=True)
class Rewritten:
    """Counts and texts by the name of the pass, the calls, and what is computed."""

    counts: dict[str, int]
    texts: dict[str, str]  # after the pass; "" is the graph before all of them
    calls: list[Any]
    gm: fx.GraphModule
    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def rewrite(
    fn: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = False
) -> Rewritten:
    """`fn` as the passes leave it, on these inputs, with the gradients of its sum."""
    torch._dynamo.reset()
    counts: dict[str, int] = {}
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        ctx: Any = SimpleNamespace(findings=Findings(), inputs={}, length=None)
        texts[""] = golden_text(gm.graph)
        for run in READERS:
            counts[run.__name__] = run(gm.graph, ctx)
            gm.graph.lint()
            texts[run.__name__] = golden_text(gm.graph)
        gm.recompile()
        found.extend((gm, ctx.findings.calls))
        return gm.forward

    texts: dict[str, str] = {}
    step = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    results, gradients = run(step, inputs)
    gm, calls = found
    return Rewritten(counts, texts, calls, gm, results, gradients)


def run(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results of `fn` as a tuple, and the gradients of a weighted sum of them."""
    results = fn(*(x.clone() if x.requires_grad else x for x in inputs))
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in results)
    trained = [x for x in inputs if x.requires_grad]
    if not trained:
        return results, ()
    gradients = torch.autograd.grad(
        loss, trained, allow_unused=True, materialize_grads=True
    )
    return results, gradients


def check_equal(got: Rewritten, fn: Callable[..., Any], *inputs: Tensor) -> None:
    """Assert that the rewritten graph computes what `fn` does; inputs are float64."""
    results, gradients = run(fn, inputs)
    wanted = (*results, *gradients)
    pairs = zip((*got.results, *got.gradients), wanted, strict=True)
    for number, (x, y) in enumerate(pairs):
        kind = "result" if number < len(results) else "grad of trained input"
        assert_close(f"{kind} {number}", x, y)
