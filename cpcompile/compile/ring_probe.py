"""Lower one tiny ring, to see what no list of symbols tells: that it is unrolled.

Inductor writes code for the backward of a ring of three ranks, which has every kind of
call; then the order of its messages is read in the code, as `config.check_overlap` does
it. Without our dependencies even Inductor's default settings lose that order. Nothing
is compiled or run, and the group exchanges nothing. It takes half a second of a core,
half of it for imports that the first compilation needs anyway.

Private interfaces of torch are imported where they are used, because a version may have
moved any of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.distributed_c10d import GroupName

from cpcompile.compile.overlap import check_overlap
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.step import lowering
from cpcompile.passes.local.expand_ring import Unrolling, expand_ring

_GROUP = GroupName("a tiny ring of cpcompile")
_RANKS = 3  # the smallest ring with a step that is neither the first nor the last
_TOKENS = 8  # of each rank


@functools.cache
def ring_problem(device: str) -> str | None:
    """Return what goes wrong when Inductor lowers a ring on `device`; None if nothing.

    It is the same on all ranks, because it depends on the installed torch alone.
    """
    try:
        messages = len(check_overlap(_code(device)))
    except Exception as error:  # whatever it is, the ring can stay one operator
        text = str(error).strip() or "no message"
        return f"a tiny ring: {type(error).__name__}: {text.splitlines()[0]}"
    # Keys and values are sent in every step but the last, their gradients in all.
    expected = 2 * _RANKS - 1
    if messages != expected:
        return f"a tiny ring: its code has {messages} messages, needed {expected}"
    return None


def _code(device: str) -> str:
    """Return the code that Inductor writes for the backward of a ring."""
    # Seen in 2.11 to 2.15; where a name is missing, rings are not unrolled.
    from torch._guards import tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    lowering.register()
    with (
        _group(),
        tracing(None),
        _disable_current_modes(),
        inductor_config.patch(max_autotune=False),
        FakeTensorMode() as mode,
    ):
        gm, inputs = _graph(device)
        expand_ring(gm.graph, Unrolling(_RANKS, lambda ring: "auto"))
        lowered = GraphLowering(gm, example_inputs=inputs, is_backward=True)
        handlers = V.set_graph_handler(lowered), V.set_fake_mode(mode)
        with handlers[0], handlers[1], DebugContext():
            lowered.run(*inputs)
            code: str = lowered.codegen()[0].value
    return code


def _graph(device: str) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Make a graph of one call of the operator, whose inputs are fake tensors."""
    op: Any = torch.ops.cp.ring_attention_backward.default
    x = torch.empty(1, 1, _TOKENS, 16, device=device)
    inputs = [x, x, x, x, x, torch.empty(1, 1, _TOKENS, device=device)]
    whole = _TOKENS * _RANKS
    spec = AttentionSpec(scale=1.0)
    rest: tuple[Any, ...] = ([], [whole, whole], str(spec), _GROUP, False, None)
    values = op(*inputs, *rest)
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{index}") for index in range(len(inputs))]
    ring = graph.call_function(op, (*nodes, *rest))
    parts = [graph.call_function(operator.getitem, (ring, i)) for i in range(3)]
    graph.output(tuple(parts))
    every = zip((*nodes, ring, *parts), (*inputs, values, *values[:3]), strict=True)
    for node, value in every:
        node.meta["val"] = value
    return fx.GraphModule({}, graph), inputs


@contextmanager
def _group() -> Iterator[None]:
    """Register a process group of `_RANKS` ranks without a backend; this is rank 0."""
    # Seen in 2.11 to 2.15, as in `_code`.
    from torch._C._distributed_c10d import (
        HashStore,
        ProcessGroup,
        _register_process_group,
        _unregister_process_group,
    )

    group = ProcessGroup(HashStore(), 0, _RANKS)  # the name lives as long as it
    _register_process_group(_GROUP, group)
    try:
        yield
    finally:
        _unregister_process_group(_GROUP)
