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

from collections.abc import Sequence

from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Chunks, Layout, Runs, TokenLayout
from cpcompile.geometry.lengths import in_chunks
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import Results, with_exchanged_heads
from cpcompile.ops.comm.token_runs import move_runs
from cpcompile.ops.dtensor.composite import define_composite, on_local_parts
from cpcompile.ops.strategies.contract import check_inputs, check_operands, dealt_tokens
from cpcompile.ops.strategies.ring_attention import ring_attention
from cpcompile.ops.strategies.ulysses_attention import inputs_of_own_heads


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
    ulysses_group: str,
    ring_group: str,
    ulysses_inner: bool,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, by exchange of heads and a ring.

    Args:
        q, k, v, extras, sizes, spec, group: as for cp::ulysses_attention; the layout,
            contiguous or zigzag, is that of queries and keys over all ranks.
        ulysses_group, ring_group: this rank's groups, which together make up `group`.
        ulysses_inner: whether the Ulysses groups consist of consecutive ranks, else
            the rings do.

    Returns: as cp::ulysses_attention.

    Raises: ValueError if the groups are no such factorisation of `group`, or for
    operands that are not chunks of the layout; for the zigzag layout with rings of
    consecutive ranks or, if causal, other numbers of keys than of queries; for masks as
    cp::ring_attention.
    """
    name, (q_len, kv_len) = "cp::hybrid_attention", sizes

    def local(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Results:
        pg = group_by_name(group)
        exchange, ring = group_by_name(ulysses_group), group_by_name(ring_group)
        u, r = exchange.size(), ring.size()
        place = ring.rank() * u + exchange.rank()
        if not ulysses_inner:
            place = exchange.rank() * r + ring.rank()
        if (u * r, place) != (pg.size(), pg.rank()):
            raise ValueError(
                f"{name}: rank {pg.rank()} of {pg.size()} in group "
                f"{group!r} is rank {exchange.rank()} of {u} in {ulysses_group!r} and "
                f"{ring.rank()} of {r} in {ring_group!r}, so rank {place} of {u * r} "
                f"with ulysses_inner={ulysses_inner}; needed groups that factorise it"
            )
        layout = inputs.spec.layout
        if layout is not Layout.CONTIGUOUS and not ulysses_inner:
            raise ValueError(
                f"{name}: got layout={layout.value!r} with rings of consecutive ranks; "
                "needed ulysses_inner=True, or the contiguous layout"
            )
        queries, keys = (
            Chunks(in_chunks(length, x.shape[2], u * r), u * r)
            for length, x in ((q_len, q), (kv_len, k))
        )
        ordered = inputs.spec.is_causal or inputs.has_modifiers
        tokens = dealt_tokens(Strategy.HYBRID, layout, queries, keys, ordered)
        check_operands(name, q, k, v, queries, keys, pg.rank())
        q_runs, k_runs = (
            Runs.of_hybrid(chunks, u, ulysses_inner) for chunks in (queries, keys)
        )
        lengths = q_runs.count(ring.rank()), k_runs.count(ring.rank())
        chunks = queries.size, keys.size
        if inputs.has_modifiers:
            check_inputs(name, q, inputs, (q_len, kv_len))
        of_heads = (lengths[0], chunks[0], ulysses_group)
        own = inputs_of_own_heads(inputs, q.shape[1], *of_heads)
        extras, spec = own.arguments()
        whole = [queries.length, keys.length]
        held = [q_runs.pieces, q_runs.size, k_runs.size]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Results:
            if tokens is not None:
                q, k, v = (_ascending(x, tokens, ring.rank(), u) for x in (q, k, v))
            out: Tensor
            lse: Tensor
            out, lse = ring_attention(q, k, v, extras, whole + held, spec, ring_group)
            results = [out, lse.unsqueeze(-1)] if own.spec.wants_lse else [out]
            if tokens is not None:
                results = [_by_rank(x, tokens, ring.rank(), u) for x in results]
            return results[0], results[1].squeeze(-1) if results[1:] else None

        return with_exchanged_heads(attend, q, k, v, lengths, chunks, ulysses_group)

    return on_local_parts(local, (q, k, v), AttentionInputs.of(spec, extras), group)


define_composite(
    "hybrid_attention",
    hybrid_attention,
    "str ulysses_group, str ring_group, bool ulysses_inner",
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
