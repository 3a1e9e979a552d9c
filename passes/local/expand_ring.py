"""Unroll rings in a graph of local tensors, after autograd: N x (shift, step, wait).

    ring = cp.ring_attention(q, k, v, [], [Sq, Sk], "causal scale=0.125", group)
      ->
    arriving = cp.ring_shift([k, v], group)
    out, lse = cp.attention_step(q, k, v, None, None, ..., after=arriving[0])
    k_1, v_1 = cp.ring_wait(arriving[0], out), cp.ring_wait(arriving[1], out)
    out, lse = cp.attention_step(q, k_1, v_1, out, lse, ...)
    ...

Inductor then sees the steps: it fuses what stands around them, lowers each through its
template, and keeps the messages in flight while steps run. What is traced is the
function that the operator itself runs, so that both are the same ring. The graph has
the same calls on every rank; the rank enters as integers. By default up to 128 steps of
a graph are unrolled; rings under a mask of a symbolic length stay one operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile import config
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward
from cpcompile.torch_private.fake_tensors import detect_fake_mode

from ..graph.calls import canonical_call
from ..graph.graph_pass import graph_pass

RINGS: dict[Any, tuple[Callable[..., Any], str]] = {
    torch.ops.cp.ring_attention.default: (ring_forward, "forward"),
    torch.ops.cp.ring_attention_backward.default: (ring_backward, "backward"),
}
# The argument that names the group of a ring; a hybrid has a ring inside.
_GROUP_ARGUMENT: dict[Any, str] = {
    torch.ops.cp.ring_attention.default: "group",
    torch.ops.cp.ring_attention_backward.default: "group",
    torch.ops.cp.hybrid_attention.default: "ring_group",
}
# What a node inherits from the call it is a part of.
_INHERITED = ("stack_trace", "nn_module_stack", "from_node", "seq_nr")


# A step costs Inductor about 0.2 s, forward and backward, measured for 8 ranks. Rings
# of no more steps in a graph are unrolled by themselves: 4 ranks in 32 layers, or 8 in
# 16.
AUTO_STEPS = 128


@dataclass(frozen=True)
class Unrolling:
    """The input of `expand_ring` in addition to its graph.

    limit: ranks of the largest ring to unroll. None: all rings, unless they have more
        than AUTO_STEPS steps together.
    choose_kernel: names the kernel of a ring's steps, as `config.step_kernel` does.
    """

    limit: int | None
    choose_kernel: Callable[[fx.Node], str | None]


@graph_pass()
def expand_ring(graph: fx.Graph, ctx: Unrolling) -> int:
    """Unroll rings; return their number. Rings with a symbolic mask stay one call."""
    limit = ctx.limit
    all_rings = [node for op in RINGS for node in _calls(graph, op)]
    rings = [node for node in all_rings if not _has_symbolic_mask(node)]
    if limit is not None:
        rings = [node for node in rings if _ranks(node) <= limit]
    elif sum(map(_steps, rings)) > AUTO_STEPS:
        return 0
    for node in rings:
        with config.patch(step_kernel=ctx.choose_kernel(node)):
            body = _trace(node)
        _inline(node, body)
    return len(rings)


def _calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=op))


def _tensors(node: fx.Node) -> dict[str, fx.Node]:
    """Return the tensors among the arguments of a ring, by name."""
    arguments = canonical_call(node).arguments
    extras = zip(_spec(node).extras, arguments["extras"], strict=True)
    by_name = {**arguments, **dict(extras)}
    return {
        name: x
        for name, x in by_name.items()
        if isinstance(x, fx.Node) and isinstance(x.meta["val"], Tensor)
    }


def ring_group(node: fx.Node) -> str | None:
    """Return the group of the ring that `node` runs, or has inside; None if no ring."""
    name = _GROUP_ARGUMENT.get(node.target)
    return None if name is None else str(_argument(node, name))


def _ranks(node: fx.Node) -> int:
    return group_by_name(str(ring_group(node))).size()


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a ring, also one that the graph leaves out."""
    return canonical_call(node).arguments[name]


def _spec(node: fx.Node) -> AttentionSpec:
    return AttentionSpec.of_text(_argument(node, "spec"))


def has_mask(node: fx.Node) -> bool:
    """Tell whether a ring has a mask, or changes scores, as its spec says it."""
    return _spec(node).has_modifiers


def _has_symbolic_mask(node: fx.Node) -> bool:
    """Tell whether a mask is cut into parts of rows whose number is a symbol."""
    return isinstance(_argument(node, "sizes")[0], fx.Node) and has_mask(node)


def _pieces(node: fx.Node) -> int:
    """Return the number of runs of tokens that a rank has."""
    pieces = [*_argument(node, "sizes"), 1][2]
    assert isinstance(pieces, int), f"{node} has {pieces} runs"
    return pieces


def _steps(node: fx.Node) -> int:
    """Return the number of steps of a ring: one per rank and run of tokens."""
    return _ranks(node) * _pieces(node)


def _trace(node: fx.Node) -> fx.Graph:
    """Trace the ring of `node` as a graph whose inputs are the tensors of the call."""
    from cpcompile.torch_private.inductor import select_decomp_table  # slow to import

    function, direction = RINGS[node.target]
    names = list(_tensors(node))
    values = [x.meta["val"] for x in _tensors(node).values()]
    (q_len, kv_len, *runs), spec = _argument(node, "sizes"), _spec(node)
    group, pieces = _argument(node, "group"), _pieces(node)
    bias_grad = direction == "backward" and _argument(node, "bias_grad")
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None, f"{node} has no fake inputs"

    def ring(*tensors: Tensor) -> Any:
        # Ranks divide a length that is a symbol; from here on it is a chunk per rank.
        operands = dict(zip(names, tensors, strict=True))
        chunks = [operands[name].shape[2] for name in ("q", "k")]
        sizes = [
            chunk * _ranks(node) if isinstance(length, fx.Node) else length
            for chunk, length in zip(chunks, (q_len, kv_len), strict=True)
        ]
        if runs:
            own = zip(chunks, runs[1:], strict=True)
            sizes += [pieces]
            sizes += [
                chunk // pieces if isinstance(size, fx.Node) else size
                for chunk, size in own
            ]
        inputs = AttentionInputs(spec, **{x: operands.pop(x) for x in spec.extras})
        call = Ring.of(inputs, sizes, group, direction)
        if bias_grad:
            return function(**operands, ring=call, bias_grad=True)
        return function(**operands, ring=call)[:3]

    with fake_mode, torch.no_grad():
        traced = make_fx(ring, decomposition_table=select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    return traced.graph


def _inline(node: fx.Node, body: fx.Graph) -> None:
    """Put the nodes of `body` in the place of `node`."""
    inputs = body.find_nodes(op="placeholder")
    copies = dict(zip(inputs, _tensors(node).values(), strict=True))
    inherited = {name: node.meta[name] for name in _INHERITED if name in node.meta}
    with node.graph.inserting_before(node):
        for part in body.nodes:
            if part.op not in ("placeholder", "output"):
                copies[part] = node.graph.node_copy(part, copies.__getitem__)
                # Inductor names kernels after the original operator.
                copies[part].meta.setdefault("original_aten", part.target)
                copies[part].meta.update(inherited)
    results = body.output_node().args[0]
    assert isinstance(results, tuple | list)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} is no getitem of {node}"
        index = user.args[1]
        assert isinstance(index, int)
        if user.users:  # the gradient of a bias, which there is not, has none
            result = results[index]
            assert isinstance(result, fx.Node)
            user.replace_all_uses_with(copies[result])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
