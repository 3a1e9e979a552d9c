"""Note how masks that could not be read came out, and warn of large ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from cpcompile.logs import warn_once

from ..joint.tiling import sink_slices
from .attention_nodes import forward_of, is_attention, operand_of, plan_number
from .local_values import LocalValues


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


def note_masks(found: dict[int, Any], known: LocalValues) -> None:
    """Write `findings.mask_forms`; found: by `unread_masks`, of the finished graph.

    Where every rank has a large mask, its rows are cut before they are made.
    """
    if any(found.values()):
        sink_slices.sink(known.graph, sink_slices.LEAST_BYTES)
    findings, left = known.ctx.findings, set(known.graph.nodes)
    for number, node in found.items():
        call = list(findings.plans)[number]
        mask = findings.masks[call]
        unread = mask.unread
        assert unread is not None, "it was not read"
        if node not in left:
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
