"""Read the attention operators of a joint graph, forward and backward.

What became of masks that could not be read is noted, and large ones are warned of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.layout import Layout
from cpcompile.logs import warn_once
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import OpOverload

from ..graph.cp_attention import OPERATORS, PLAN
from ..graph.nodes import reached, value_of
from ..joint.tiling import sink_slices
from .composition_rules import COMPOSITIONS
from .local_values import LocalValues

_FORWARD = {*OPERATORS.values(), *(x.forward for x in COMPOSITIONS)}
_GRADIENT = "_attention_backward"  # how the names of all others end


def is_attention(node: fx.Node) -> bool:
    """Tell whether a node attends, or computes the gradient of attention."""
    call = node.target
    if not isinstance(call, OpOverload) or not call.namespace.startswith("cp"):
        return False
    return call in _FORWARD or str(call._opname).endswith(_GRADIENT)


def forward_of(node: fx.Node) -> fx.Node:
    """Return the attention whose gradient a node computes; itself if it attends."""
    if node.target in _FORWARD:
        return node
    names = _names(node)
    found: Any = node.args[names.index("out" if "out" in names else "saved")]
    while not is_attention(found):  # a result, or that result detached
        found = found.all_input_nodes[0]
    return found  # type: ignore[no-any-return]


def keys_of(node: fx.Node) -> tuple[list[int], tuple[int, ...]]:
    """Return the places of keys and values among the leaves of the arguments.

    And those of the results that are like them.
    """
    results = (1, 2) if "grad" in _names(node) else ()
    return _places(node, ("k", "v")), results


def cut_places(node: fx.Node) -> list[int]:
    """Return the places of what has this rank's tokens, [B, H, S, ..].

    What a gradient reads of its forward is cut already.
    """
    keys = () if spec_of(node).whole_keys else ("k", "v")
    return _places(node, ("grad", "grad_lse", "q", *keys))


def plan_number(node: fx.Node) -> int | None:
    """Return the place of an operator's plan among the plans of its graph."""
    number: int | None = forward_of(node).meta.get("custom", {}).get(PLAN)
    return number


def spec_of(node: fx.Node) -> AttentionSpec:
    """Return what an operator computes."""
    return AttentionSpec.of_text(str(node.args[_names(node).index("spec")]))


def operand_of(node: fx.Node, name: str) -> fx.Node | None:
    """Return one of the tensors beside q, k and v, such as "bias", if it is given."""
    extras: Any = node.args[_names(node).index("extras")]
    return dict(zip(spec_of(node).extras, extras, strict=True)).get(name)


def needs_order(node: fx.Node) -> bool:
    """Tell whether the result of an operator depends on the positions of tokens."""
    spec = spec_of(node)
    return spec.is_causal or spec.has_mask


def with_layout(node: fx.Node, layout: Layout) -> tuple[Any, ...]:
    """Return the arguments of an operator on tokens in a layout."""
    args = list(node.args)
    args[_names(node).index("spec")] = str(replace(spec_of(node), layout=layout))
    return tuple(args)


def _places(node: fx.Node, wanted: Sequence[str]) -> list[int]:
    names = _names(node)
    before = (node.args[: names.index(x)] for x in wanted if x in names)
    return [len(pytree.tree_leaves(x)) for x in before]


def _names(node: fx.Node) -> list[str]:
    return [x.name for x in node.target._schema.arguments]  # type: ignore[union-attr]


def unread_masks(calls: Iterable[fx.Node], known: LocalValues) -> dict[int, Any]:
    """Return the local nodes of masks that were not read, by their plan's place.

    None for one of which ranks have rows.

    calls: of the graph of the whole sequence. known: what they are on this rank.
    """
    findings, found = known.ctx.findings, dict[int, Any]()
    for node in calls:
        number = plan_number(node) if is_attention(node) else None
        if number is None or forward_of(node) is not node:
            continue
        mask = findings.masks.get(list(findings.plans)[number])
        bias = operand_of(node, "bias")
        if mask is None or mask.unread is None or bias is None:
            continue
        parts = [known.values.get(bias)]
        parts += [side[bias][0] for side in known.parts.values() if bias in side]
        cut = any(map(known.is_shard, parts))
        found[number] = None if cut else known.local[bias]
    return found


def _makers(mask: Any) -> set[fx.Node]:
    """Return the calls that make a mask, and what has all its pairs, on the way."""
    pairs = value_of(mask).numel()

    def is_maker(node: fx.Node) -> bool:
        value = value_of(node)
        is_large = not isinstance(value, Tensor) or value.numel() >= pairs
        return is_large and node.op == "call_function"

    found = reached([mask], lambda x: filter(is_maker, x.all_input_nodes))
    return {x for x in found if not getattr(x.target, "is_view", False)} or {mask}


def note_masks(found: dict[int, Any], known: LocalValues) -> None:
    """Write `findings.mask_forms`; found: by `unread_masks`, of the finished graph.

    Where every rank has a large mask, its rows are cut before they are made.
    """
    makers = {number: _makers(x) for number, x in found.items() if x is not None}
    if makers:
        sink_slices.sink(known.graph, sink_slices.LEAST_BYTES)
    findings, left = known.ctx.findings, set(known.graph.nodes)
    for number in found:
        call = list(findings.plans)[number]
        mask = findings.masks[call]
        unread = mask.unread
        assert unread is not None, "it was not read"
        if left.isdisjoint(makers.get(number, ())):
            findings.mask_forms[number] = "by rows"
            continue
        findings.mask_forms[number] = f"whole on every rank ({unread.bytes} bytes)"
        if unread.is_large:
            warn_once(
                f"attention at {call.path}: got an attn_mask that cannot be read as a "
                f"function of positions ({unread.reason}), a {mask.text} of which "
                f"every rank computes all {unread.bytes} bytes; the result is correct. "
                "Needed one that is an input of the graph, or computed row by row from "
                "values of the queries and of the keys"
            )
