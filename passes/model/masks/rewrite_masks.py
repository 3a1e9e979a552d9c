"""Read what an attn_mask says as a function of positions.

    arange -> le -> expand [2, 1, 16, 16] -> scaled_dot_product_attention(.., attn_mask)
      ->  is_causal=True, without a mask

    attention_mask, arange -> and_ -> scaled_dot_product_attention(.., attn_mask)
      ->  masks: Mask(key_ranges, q_segment_ids [1, 16], kv_segment_ids [2, 16])

A mask takes these steps. Its computation is traced to a program of few kinds of calls
(analysis/mask_program). The program is read as a formula, of which parts are key
ranges, segment ids, or neither (analysis/mask_meaning). The reading is written as nodes
(analysis/mask_writer); where a part is neither, the model's own mask is added as a
bias. Nodes that only the mask needed are erased (erase_masks).

What is read is exact, or the mask stays a bias. Where it would stay one, the values of
buffers are read (analysis/constant_masks); the program is right for these values only,
see constant_buffers. A mask that could only be computed for all pairs at once is a
bias, too, see unread_masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    guard_region,
    is_same,
    is_symbol,
)
from cpcompile.geometry.masks import Mask

from ...graph.context import AttentionCall, Context, MaskSource
from ...graph.effects import written_by
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    Regions,
    all_nodes,
    fake_mode_of,
    fake_value,
    region_arguments,
)
from .analysis.constant_masks import by_value, fold_constants
from .analysis.mask_meaning import MaskMeaning, read_mask
from .analysis.mask_program import (
    MaskProgram,
    Unreadable,
    has_symbols,
    memory_of,
    resolve,
    source_of,
    trace,
    writes_of,
)
from .analysis.mask_writer import MaskWriter
from .any_length.rewrite_any_length import AnyLengthWriter, at_longest
from .erase_masks import drop_mask, erase_masks
from .unread_masks import bias_of, unread_mask
from .write_masks import fits, meanings, write, write_causal_limits

log = logging.getLogger(__name__)

_Sizes = tuple[int, int, int]  # the batch, queries, and keys


@graph_pass(
    writes=(
        "calls",
        "masks",
        "read_by_value",
        "mask_sources",
    )
)
def rewrite_masks(graph: fx.Graph, ctx: Context) -> int:
    """Fill `findings.masks`, and rewrite calls whose masks say no more than causal.

    Returns the number of masks that were read. Raises: LengthNotSymbolic.
    """
    write_causal_limits(ctx, graph)
    calls = [
        c
        for c in ctx.findings.calls
        if c.mask and not (c.unsupported or c.already_local)
    ]
    if not calls:
        return 0
    finder = _Finder(graph, ctx)
    for call in calls:
        ctx.findings.calls[ctx.findings.calls.index(call)] = finder.find(call)
    ctx.findings.mask_sources = finder.sources
    erase_masks(graph, finder.sources)
    return len(finder.readings)


class _Finder:
    """Reader of the masks of one graph; layers share a mask, and so its reading."""

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.fake_mode = fake_mode_of(graph)
        self.order = list(all_nodes(graph))
        self.place = {node: i for i, node in enumerate(self.order)}
        self.writes = writes_of(self.order)
        written = {memory_of(x) for w in self.writes for x in written_by(w)}
        self.buffers = {
            node: buffer.value
            for node, buffer in ctx.buffers.items()
            if memory_of(node) not in written
        }
        self.outer = dict(region_arguments(graph))
        self.regions = Regions(graph)
        self.sources: list[MaskSource] = []
        self.readings: dict[Any, tuple[MaskMeaning, Mask | None]] = {}
        self.problems: dict[Any, str] = {}

    def find(self, call: AttentionCall) -> AttentionCall:
        """Read the mask of a call, and return the call as it is then."""
        assert call.mask is not None
        if 0 in (*call.q_shape[:-1], call.k_shape[-2]):  # of no pair it says nothing
            drop_mask(call.node, False)
            return replace(call, mask=None)
        if not fits(call):
            shapes = f"{list(fake_value(call.mask).shape)} for q {list(call.q_shape)}"
            problem = f"got an attn_mask of shape {shapes}, which makes q larger"
            return replace(call, unsupported=f"{problem}; needed q of that shape")
        try:
            if self.regions.is_shared(call.node.graph):
                raise Unreadable("it is used in a region that runs several times")
            meaning, reading = self._read(call)
        except Unreadable as problem:
            if call.score_mod:  # which hides keys by itself
                return self._dropped(call)
            unread = unread_mask(call, self.ctx, str(problem), self.outer)
            return self._masked(call, unread)  # Note [Masks that cannot be read]
        if reading is None:  # causal, or nothing
            drop_mask(call.node, meaning.is_causal)
            log.debug("mask of %s: %s", call.path, meaning.text or "hides nothing")
            return replace(call, mask=None, is_causal=meaning.is_causal)
        inside: dict[str, Any] = {
            name: self.regions.bring_in(node, call.node.graph)
            for name, node in vars(reading).items()
            if isinstance(node, fx.Node)
        }
        mask = replace(reading, **inside)
        if call.score_mod:
            mask = replace(mask, bias=None)
            if mask.key_ranges is None and mask.q_segment_ids is None:
                return self._dropped(call)
        elif meaning.is_dense:
            mask = replace(mask, bias=bias_of(call))
        return self._masked(call, mask)

    def _dropped(self, call: AttentionCall) -> AttentionCall:
        drop_mask(call.node, False)
        return replace(call, mask=None)

    def _masked(self, call: AttentionCall, mask: Mask) -> AttentionCall:
        log.debug("mask of %s: %s", call.path, mask.text)
        self.ctx.findings.masks[call] = mask
        return call

    def _read(self, call: AttentionCall) -> tuple[MaskMeaning, Mask | None]:
        """Read the mask of a call, once for all calls with this mask.

        Returns what it says, and its nodes unless it is merely causal, or nothing.
        """
        assert call.mask is not None
        at = self.place[call.node]
        mask = resolve(call.mask, self.outer)
        writes = [w for w in self.writes if self.place[w] < at]
        source = source_of(mask, self.order[:at], writes, self.outer)
        sizes = (call.q_shape[0], call.q_shape[-2], call.k_shape[-2])
        of_call = (len(call.q_shape), sizes, call.changes_scores, call.sinks is None)
        key = (source.mask, source.nodes, *of_call)
        if key in self.problems:
            raise Unreadable(self.problems[key])
        if key not in self.readings:
            try:
                self.readings[key] = self._new(source, call, sizes)
            except Unreadable as problem:
                self.problems[key] = str(problem)
                raise
            self.sources.append(source)
        return self.readings[key]

    def _new(
        self, source: MaskSource, call: AttentionCall, sizes: _Sizes
    ) -> tuple[MaskMeaning, Mask | None]:
        until = source.until
        if until is not None and until.graph is not self.graph:
            raise Unreadable(f"{until.name} writes into an input of the graph")
        if any(node.graph is not self.graph for node in source.inputs):
            raise Unreadable("it depends on a constant of a checkpoint region")
        program = trace(source, self.fake_mode)
        if has_symbols(source):
            return self._for_any_length(program, until, call)
        program = fold_constants(program)
        buffers = {
            node: self.buffers[node]
            for node in program.inputs.values()
            if node in self.buffers
        }
        try:
            reading = _read(program, call, sizes)
            if buffers and reading.is_dense:
                read_by_value = self._by_value(program, buffers, call, sizes)
                if read_by_value is not None:
                    return self._written(*read_by_value, until, call, sizes)
            return self._written(program, reading, until, call, sizes)
        except Unreadable:
            read_by_value = self._by_value(program, buffers, call, sizes)
            if read_by_value is None:
                raise
            return self._written(*read_by_value, until, call, sizes)

    def _for_any_length(
        self, program: MaskProgram, until: fx.Node | None, call: AttentionCall
    ) -> tuple[MaskMeaning, Mask | None]:
        """Read a mask where the length of the sequence is a symbol."""
        length = self.ctx.length
        tokens = (fake_value(x).shape[-2] for x in (call.q, call.k))
        if length is None or not all(
            is_symbol(n) and is_same(n, length) for n in tokens
        ):
            raise LengthNotSymbolic(f"the attn_mask of {call.path} has a symbolic size")
        longest = at_longest(program, length, self.fake_mode)
        sizes = (call.q_shape[0], longest.tokens, longest.tokens)
        try:
            program = fold_constants(longest.program)
            reading = _read(program, call, sizes, any_length=True)
            if reading.is_dense:
                raise Unreadable("a bias of pairs is added")
            maker = partial(AnyLengthWriter, longest)
            mask = self._written(program, reading, until, call, sizes, maker)
        except Unreadable as problem:  # for one length it may be read
            text = f"the attn_mask of {call.path}: {problem}"
            raise LengthNotSymbolic(text) from problem
        guard_region(length, 0, longest.tokens + 1)
        return mask

    def _by_value(
        self,
        program: MaskProgram,
        buffers: dict[fx.Node, Tensor],
        call: AttentionCall,
        sizes: _Sizes,
    ) -> tuple[MaskProgram, MaskMeaning] | None:
        """Read a mask with buffers as constants; None if that says nothing of it."""
        try:
            program = by_value(program, buffers)
            reading = _read(program, call, sizes)
        except Unreadable:
            return None
        if reading.is_dense and reading.key_ranges is None and reading.ids is None:
            return None
        self.ctx.findings.read_by_value |= buffers.keys()
        return program, reading

    def _written(
        self,
        program: MaskProgram,
        reading: MaskMeaning,
        until: fx.Node | None,
        call: AttentionCall,
        sizes: _Sizes,
        maker: Callable[..., MaskWriter] = MaskWriter,
    ) -> tuple[MaskMeaning, Mask | None]:
        plain = reading.is_causal and not (call.changes_scores or reading.added)
        if plain or reading.hides_nothing:
            return reading, None
        assert call.mask is not None
        anchor = until or self.regions.anchor(call.node)
        with self.graph.inserting_before(anchor):
            device = fake_value(call.q).device
            writer = maker(self.graph, call.node, program, self.fake_mode, device)
            try:
                mask = write(writer, reading, sizes, fake_value(call.mask))
            except Unreadable:
                writer.undo()
                raise
        return reading, mask


def _read(
    program: MaskProgram, call: AttentionCall, sizes: _Sizes, any_length: bool = False
) -> MaskMeaning:
    """Read the result of a program as the mask of a call."""
    return read_mask(program, meanings(call), sizes, any_length, call.sinks is not None)
