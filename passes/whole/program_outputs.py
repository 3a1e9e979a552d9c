"""Decide which results of a graph leave it, and which leave it whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.errors import OptionError
from cpcompile.geometry.lengths import expected
from cpcompile.logs import warn_once

from ..graph.context import Context
from ..graph.effects import has_effects

GATHERED_BYTES = 256 * 2**20  # what is gathered at most, if nothing is said


def goes_on_after(gm: fx.GraphModule) -> bool:
    """Tell whether Dynamo goes on after the graph, and reads its results there."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def keep_named(
    gm: fx.GraphModule, names: Sequence[str]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Take results other than the named ones out of the graph.

    names: names of variables of the model, as Dynamo has them: "loss" is `loss` or
    `loss_1`. A graph before a graph break keeps all of its results.

    Returns: a function that puts None in their places.

    Raises: OptionError for a name that no result has, with those that there are.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    if goes_on_after(gm):
        return tuple
    called = [re.sub(r"_\d+$", "", getattr(x, "name", "")) for x in results]
    if missing := [x for x in names if x not in called]:
        raise OptionError(
            f"cpcompile.config.outputs: got {', '.join(map(repr, missing))}; needed "
            f"names of results: {', '.join(map(repr, dict.fromkeys(called)))}"
        )
    indices = [i for i, name in enumerate(called) if name in names]
    output.args = (tuple(results[i] for i in indices),)
    gm.graph.eliminate_dead_code(is_impure_node=has_effects)
    gm.recompile()
    count = len(results)

    def spread(values: Sequence[Any]) -> tuple[Any, ...]:
        outputs: list[Any] = [None] * count
        for place, value in zip(indices, values, strict=True):
            outputs[place] = value
        return tuple(outputs)

    return spread


def gather_limit(gm: fx.GraphModule, megabytes: float | None) -> float:
    """Return the bytes up to which a result is gathered.

    megabytes: the setting gather_outputs_megabytes. With None all that is needed after
        a graph break is gathered: a DTensor could meet plain tensors there.
    """
    if megabytes is None:
        return math.inf if goes_on_after(gm) else GATHERED_BYTES
    return megabytes * 2**20


def is_gathered(name: str, value: Tensor, ctx: Context) -> bool:
    """Tell whether a sharded result leaves as a plain tensor; `name` has its shape.

    The result is that of a call with plain inputs. One that is too large is named in a
    warning, unless nothing is to be gathered.
    """
    size = math.prod(map(expected, value.shape)) * value.element_size()
    if size <= ctx.gather_limit:
        return True
    if ctx.gather_limit > 0:
        warn_once(
            f"result {name} has {size / 2**20:.0f} MiB: it stays sharded, as a "
            "DTensor. cp.unshard(it), called on every rank, gathers it; "
            "cpcompile.config.outputs names the results that are needed, so that "
            "others are not made; results of up to "
            "cpcompile.config.gather_outputs_megabytes are gathered"
        )
    return False
