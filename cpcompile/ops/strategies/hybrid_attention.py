"""cp::hybrid_attention: exchange heads in groups of ranks, with a ring between them.

N = u * r ranks, in the order of the sequence, of which u exchange heads (as
cp::ulysses_attention does) and r form a ring (cp::ring_attention). "Ulysses inner": u
consecutive ranks exchange heads, so that each then holds one run of tokens. "Ring
inner": r consecutive ranks are a ring; who exchanges heads lies r apart, and then holds
u runs. Method: Fang and Zhao, USP (arXiv 2405.07719).

                     rank      0 1 2 3    u = r = 2
    ulysses inner    heads     0 0 1 1    ring 0 1 0 1    who has the same number
    ring inner       heads     0 1 0 1    ring 0 0 1 1    is in one group

Note [Zigzag of exchanged heads]
In the zigzag layout the u consecutive ranks of an exchange hold, together, what one
rank of the ring of r has in that layout, but rank by rank. Causal attention reorders
it, and the result back:

    exchanged   h0 t0 h1 t1 h2 t2    heads h and tails t of the ranks, u = 3
    ring        h0 h1 h2 t2 t1 t0    ascending positions
"""

from __future__ import annotations

from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Chunks, Layout, Runs, TokenLayout
from cpcompile.geometry.lengths import in_chunks
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import with_exchanged_heads
from cpcompile.ops.comm.token_runs import move_runs
from cpcompile.ops.dtensor.composite import define_composite, on_local_parts
from cpcompile.ops.step.row_mask import MaskOperands
from cpcompile.ops.strategies.contract import (
    check_masks,
    check_operands,
    dealt_tokens,
)
from cpcompile.ops.strategies.ring_attention import ring_attention
from cpcompile.ops.strategies.ulysses_attention import masks_of_own_heads


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    ulysses_group: str,
    ring_group: str,
    ulysses_inner: bool,
    layout: str = "contiguous",
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over a sequence sharded on `group`, by exchange of heads and a ring.

    Args:
        q, k, v, q_len, kv_len, is_causal, scale, group: as for cp::ulysses_attention.
        ulysses_group, ring_group: this rank's groups, which together make up `group`.
        ulysses_inner: whether the Ulysses groups consist of consecutive ranks, else
            the rings do.
        layout: "contiguous" or "zigzag", of queries and keys over all ranks.
        bias, key_ranges, q_segment_ids, kv_segment_ids, known: as for
            cp::ring_attention.

    Returns: out [B, H, local queries, E] in q's dtype; rows without any key are 0.

    Raises: ValueError if the groups are no such factorisation of `group`, or for
    operands that are not chunks of the layout; for the zigzag layout with rings of
    consecutive ranks or, if causal, other numbers of keys than of queries; for masks as
    cp::ring_attention.
    """

    def local(q: Tensor, k: Tensor, v: Tensor, masks: MaskOperands) -> Tensor:
        pg = group_by_name(group)
        exchange, ring = group_by_name(ulysses_group), group_by_name(ring_group)
        u, r = exchange.size(), ring.size()
        place = ring.rank() * u + exchange.rank()
        if not ulysses_inner:
            place = exchange.rank() * r + ring.rank()
        if (u * r, place) != (pg.size(), pg.rank()):
            raise ValueError(
                f"cp::hybrid_attention: rank {pg.rank()} of {pg.size()} in group "
                f"{group!r} is rank {exchange.rank()} of {u} in {ulysses_group!r} and "
                f"{ring.rank()} of {r} in {ring_group!r}, so rank {place} of {u * r} "
                f"with ulysses_inner={ulysses_inner}; needed groups that factorise it"
            )
        if layout != Layout.CONTIGUOUS.value and not ulysses_inner:
            raise ValueError(
                f"cp::hybrid_attention: got layout={layout!r} with rings of "
                "consecutive ranks; needed ulysses_inner=True, or layout='contiguous'"
            )
        queries, keys = (
            Chunks(in_chunks(length, x.shape[2], u * r), u * r)
            for length, x in ((q_len, q), (kv_len, k))
        )
        name = "cp::hybrid_attention"
        ordered = is_causal or masks.are_given
        tokens = dealt_tokens(Strategy.HYBRID, layout, queries, keys, ordered)
        check_operands(name, q, k, v, queries, keys, pg.rank())
        q_runs, k_runs = (
            Runs.of_hybrid(chunks, u, ulysses_inner) for chunks in (queries, keys)
        )
        lengths = q_runs.count(ring.rank()), k_runs.count(ring.rank())
        sizes = queries.size, keys.size
        own = masks
        if masks.are_given:
            check_masks(name, q, masks, (q_len, kv_len), is_causal)
        if masks.are_given or masks.sinks is not None:
            own = masks_of_own_heads(
                masks, q.shape[1], lengths[0], sizes[0], ulysses_group
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if tokens is not None:
                q, k, v = (_ascending(x, tokens, ring.rank(), u) for x in (q, k, v))
            out: Tensor
            whole = (queries.length, keys.length)
            held = (q_runs.pieces, q_runs.size, k_runs.size, layout)
            rest = (*whole, is_causal, scale, ring_group, *held, *own)
            out, _ = ring_attention(q, k, v, *rest)
            return out if tokens is None else _by_rank(out, tokens, ring.rank(), u)

        return with_exchanged_heads(attend, q, k, v, lengths, sizes, ulysses_group)

    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds, sinks)
    masks = MaskOperands.of(fields, known, *changes)
    return on_local_parts(local, (q, k, v), masks, group)


define_composite(
    "hybrid_attention(Tensor q, Tensor k, Tensor v, SymInt q_len, SymInt kv_len, "
    "bool is_causal, float scale, str group, str ulysses_group, str ring_group, "
    "bool ulysses_inner, str layout='contiguous', Tensor? bias=None, "
    "Tensor? key_ranges=None, Tensor? q_segment_ids=None, Tensor? kv_segment_ids=None, "
    "str known='', float softcap=0.0, float dropout_p=0.0, Tensor? seeds=None, "
    "Tensor? sinks=None) -> Tensor",
    hybrid_attention,
)


def _ascending(x: Tensor, tokens: TokenLayout, group: int, u: int) -> Tensor:
    """Put [B, heads, tokens, dim] in ring order; Note [Zigzag of exchanged heads]."""
    counts = [n for pair in _heads_and_tails(tokens, group, u) for n in pair]
    order = [*range(0, 2 * u, 2), *range(2 * u - 1, 0, -2)]
    found: Tensor = move_runs(x, counts, order)
    return found


def _by_rank(x: Tensor, tokens: TokenLayout, group: int, u: int) -> Tensor:
    """Undo `_ascending`."""
    heads, tails = zip(*_heads_and_tails(tokens, group, u), strict=True)
    pairs = zip(range(u), range(2 * u - 1, u - 1, -1), strict=True)
    order = [i for pair in pairs for i in pair]
    found: Tensor = move_runs(x, [*heads, *reversed(tails)], order)
    return found


def _heads_and_tails(tokens: TokenLayout, group: int, u: int) -> list[tuple[int, int]]:
    """Count the tokens of both halves that each rank of an exchange holds."""
    ranks = range(group * u, (group + 1) * u)
    heads = [tokens.head(rank) for rank in ranks]
    counts = [tokens.count(rank) for rank in ranks]
    return [(h, n - h) for h, n in zip(heads, counts, strict=True)]
