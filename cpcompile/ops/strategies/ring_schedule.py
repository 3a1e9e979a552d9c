"""One rank's view of a ring: the chunk that is here in each step, and what it sees.

Note [Several runs of tokens]
A rank whose tokens are several runs of the sequence computes causal attention run by
run: each run of queries has a chain of steps of its own. What travels are all keys of a
rank together, so messages are those of the plain ring, and hidden by more steps.

Note [Only where needed]
Under a mask all ranks know which rank sees keys of which chunk. Chunk s is at rank
s + offset in the step of an offset. Offsets at which no rank sees anything are left
out: from one to the next a chunk jumps over the ranks in between.

    window within one chunk, causal     offsets 0, 1           one message
    the same in both directions         offsets 0, 1, N - 1    two
    causal                              offsets 0 .. N - 1     N - 1

A ring that is traced before the mask is there has all offsets, unless the mask is one
of constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.geometry.lengths import is_symbol
from cpcompile.geometry.visibility import (
    NOTHING,
    Visible,
    upper_of_rows,
    visible_chunk,
    visible_run,
    visible_tokens,
)
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import PLAIN, AttentionInputs
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from cpcompile.ops.step.rows_under_mask import MaskSummary
from cpcompile.ops.step.step_arguments import RingPlace, StepChunk
from cpcompile.ops.strategies.contract import (
    check_inputs,
    check_mask_layout,
    check_operands,
    dealt_tokens,
)
from cpcompile.torch_private.fake_tensors import is_fake


@dataclass(frozen=True)
class RingStep:
    """One call of a ring step: which part of the local queries, and what it sees."""

    part: int
    visible: Visible
    is_last: bool  # of this part, in the step

    def chunk(
        self, scale: float, q: Tensor, k: Tensor, kernel: StepKernel
    ) -> StepChunk:
        """Return what a step of q [.., R, D] sees of k [.., K, D].

        Integers are literals in our kernels, so that symbols go into a vector there.
        """
        in_kernel = kernel is StepKernel.TEMPLATE
        if not in_kernel or not any(map(is_symbol, self.visible.to_list())):
            return StepChunk.plain(scale, self.visible)
        upper = upper_of_rows(self.visible, q.shape[2], k.shape[2], q.device)
        return StepChunk.plain(scale, upper=upper)


@dataclass(frozen=True)
class Ring:
    """One rank's view of the ring."""

    queries: Runs
    keys: Runs
    is_causal: bool
    group: str
    rank: int
    direction: str
    tokens: TokenLayout | None = None  # which are where; None: as queries and keys say
    inputs: AttentionInputs = PLAIN
    offsets: tuple[int, ...] | None = None  # None: all, see Note [Only where needed]
    summary: MaskSummary | None = None  # of the mask, see ring_masks.py

    @classmethod
    def of(
        cls, inputs: AttentionInputs, sizes: Sequence[int], group: str, direction: str
    ) -> Ring:
        """Make the ring of `group`; arguments and errors: as cp::ring_attention."""
        pg, spec = group_by_name(group), inputs.spec
        q_len, kv_len, *runs = sizes
        pieces = 1
        if runs:
            pieces, *chunks = runs
            queries, keys = (
                Runs(length, pg.size(), size, pieces)
                for length, size in zip((q_len, kv_len), chunks, strict=True)
            )
        else:
            queries, keys = (Runs.contiguous(n, pg.size()) for n in (q_len, kv_len))
        if inputs.has_modifiers:
            check_mask_layout(Strategy.RING, inputs, (q_len, kv_len))
        tokens = dealt_tokens(Strategy.RING, spec.layout, queries, keys, spec.is_causal)
        if pieces != 1 and spec.layout is not Layout.CONTIGUOUS:
            raise ValueError(
                f"cp::ring_attention: got {pieces} runs of tokens in the "
                f"{spec.layout.value} layout; needed one, or the contiguous layout"
            )
        who = (group, pg.rank(), direction)
        return cls(queries, keys, spec.is_causal, *who, tokens, inputs)

    def check(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless operands and inputs are those of this rank."""
        check_operands(name, q, k, v, self.queries, self.keys, self.rank)
        if self.inputs.has_modifiers:
            lengths = self.queries.length, self.keys.length
            check_inputs(name, q, self.inputs, lengths)

    @property
    def ranks(self) -> int:
        return self.keys.ranks

    @property
    def steps(self) -> int:
        return self.ranks if self.offsets is None else len(self.offsets)

    def is_plain(self, q: Tensor) -> bool:
        """Tell whether steps are plain calls: of one rank, in the operator itself.

        Else they are operators, in a graph and for the profiler.
        """
        return self.ranks == 1 and not is_fake(q)

    def offset(self, step: int) -> int:
        """Return how many ranks past its own a chunk is in a step; home at the end."""
        if step == self.steps:
            return self.ranks
        return step if self.offsets is None else self.offsets[step]

    def source(self, step: int) -> int:
        """Return the rank whose chunk is here in a step."""
        return (self.rank - self.offset(step)) % self.ranks

    @property
    def place(self) -> str:
        """Name of the operator and the rank, for messages."""
        what = f"the {self.direction} of cp::ring_attention"
        return f"{what} on rank {self.rank} of {self.ranks} in group {self.group!r}"

    def calls(self, step: int) -> tuple[RingStep, ...]:
        """Return the calls in `step`, on the chunk that is here then."""
        source = self.source(step)
        if not self.is_causal:
            visible = visible_chunk(
                *(0, self.queries.count(self.rank), 0, self.keys.count(source)),
                *(self.keys.padded, False),
            )
            return (RingStep(0, visible, True),)
        if self.tokens is not None:
            return (RingStep(0, self._dealt(self.tokens, source), True),)
        calls = []
        for part in range(self.queries.pieces):
            *others, last = visible_run(
                self.queries, self.rank, part, self.keys, source
            )
            calls += [RingStep(part, visible, False) for visible in others]
            calls.append(RingStep(part, last, True))
        return tuple(calls)

    def _dealt(self, tokens: TokenLayout, source: int) -> Visible:
        visible = visible_tokens(tokens, self.rank, source)
        # A rank's only query is in the first round, before the keys of later ranks.
        alone = visible.upper is not None and visible.upper[0] < 1
        return NOTHING if alone and tokens.count(self.rank) == 1 else visible

    def seen(
        self, step: int, call: RingStep, q: Tensor, k: Tensor, kernel: StepKernel
    ) -> StepChunk:
        """Return what a call in `step`, of q and k, sees of the keys."""
        if self.summary is None:
            scale = self.inputs.spec.scale
            return call.chunk(scale, q, k, kernel)
        place = self.rank_place(self.source(step))
        return StepChunk(self.inputs, summary=self.summary, place=place)

    def rank_place(self, source: int = 0) -> RingPlace:
        """Return this rank's place, with keys of a source, for steps under a mask."""
        own = (self.inputs.spec.layout, self.rank, source)
        return RingPlace(self.queries, self.keys, *own)

    def computes(self, step: int) -> bool:
        """Tell whether this rank has anything to compute in `step`."""
        return not all(call.visible.is_empty for call in self.calls(step))

    def split(self, x: Tensor) -> list[Tensor]:
        """Split queries, [B, H, tokens, ...], into parts that have their own steps."""
        if not self.is_causal or self.queries.pieces == 1:
            return [x]
        runs = range(self.queries.pieces)
        return list(x.split([self.queries.run(self.rank, run) for run in runs], 2))

    def where(self, step: int, what: str, hidden: bool = True) -> str:
        """Name a message that is sent in `step`; see NOTHING_TO_HIDE_IT."""
        text = f"{what} of the {self.direction} of ring attention, step {step}"
        return text if hidden else text + NOTHING_TO_HIDE_IT

    def own_chunk(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return keys and values of this rank to send: contiguous, of the full size."""
        if self.ranks == 1:
            return [k, v]
        if self.keys.length != self.keys.padded * self.ranks:
            missing = self.keys.padded - k.shape[2]
            k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
        return [k.contiguous(), v.contiguous()]
