"""cp::hybrid_attention: heads are exchanged in groups of ranks, between them is a ring.

N = u * r ranks, in the order of the sequence, of which u exchange heads (as
cp::ulysses_attention does) and r form a ring (cp::ring_attention). "Ulysses inner": u
consecutive ranks exchange heads, so that each then holds one run of tokens. "Ring
inner": r consecutive ranks are a ring; who exchanges heads lies r apart, and then holds
u runs. Method: Fang and Zhao, USP (arXiv 2405.07719).

                     rank      0 1 2 3    u = r = 2
    ulysses inner    heads     0 0 1 1    ring 0 1 0 1    who has the same number
    ring inner       heads     0 1 0 1    ring 0 0 1 1    is in one group
"""

from __future__ import annotations

from torch import Tensor

from cpcompile.layout import Chunks, Runs
from cpcompile.lengths import in_chunks
from cpcompile.ops.communication import group_by_name
from cpcompile.ops.composite import define_composite, on_local_parts
from cpcompile.ops.contract import check_operands
from cpcompile.ops.head_exchange import with_exchanged_heads
from cpcompile.ops.ring_attention import ring_attention


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
) -> Tensor:
    """Attention over a sequence sharded on `group`, by exchange of heads and a ring.

    Args:
        q, k, v, q_len, kv_len, is_causal, scale, group: as for cp::ulysses_attention.
        ulysses_group, ring_group: this rank's groups, which together make up `group`.
        ulysses_inner: whether the Ulysses groups consist of consecutive ranks, else
            the rings do.

    Returns: out [B, H, local queries, E] in q's dtype; rows without any key are 0.

    Raises: ValueError if the groups are no such factorisation of `group`, or for
    operands that are not chunks of the contiguous layout.
    """

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
        queries, keys = (
            Chunks(in_chunks(length, x.shape[2], u * r), u * r)
            for length, x in ((q_len, q), (kv_len, k))
        )
        check_operands("cp::hybrid_attention", q, k, v, queries, keys, pg.rank())
        pieces = 1 if ulysses_inner else u
        q_runs, k_runs = (
            Runs(chunks.length, r, chunks.size * u // pieces, pieces)
            for chunks in (queries, keys)
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor
            out, _ = ring_attention(
                *(q, k, v, queries.length, keys.length, is_causal, scale, ring_group),
                *(pieces, q_runs.size, k_runs.size),
            )
            return out

        lengths = q_runs.count(ring.rank()), k_runs.count(ring.rank())
        sizes = queries.size, keys.size
        return with_exchanged_heads(attend, q, k, v, lengths, sizes, ulysses_group)

    return on_local_parts(local, q, k, v, group)


define_composite(
    "hybrid_attention(Tensor q, Tensor k, Tensor v, SymInt q_len, SymInt kv_len, "
    "bool is_causal, float scale, str group, str ulysses_group, str ring_group, "
    "bool ulysses_inner) -> Tensor",
    hybrid_attention,
)
