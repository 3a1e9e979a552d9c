"""Attention calls in the spellings of users: F.scaled_dot_product_attention."""

from __future__ import annotations

from tests.fuzz.kinds import masks, projections
from tests.fuzz.site import Kind, Site

CHOICES = {
    "project": projections.PROJECT,
    "split": tuple(projections.SPLIT),
    "key heads": projections.KEY_HEADS,
    "change": projections.CHANGE,
    "merge": tuple(projections.MERGE),
    "scale": ("none", "number"),
    "residual": ("yes", "no"),
    "output": ("none", "linear"),
    "call": ("positional", "keywords"),
    **masks.FORM_CHOICES,
}


def attention(s: Site) -> None:
    """Self attention, or cross attention if the operands differ."""
    query, memory = s.a, s.b
    of_queries, of_keys = (value.lengths for value in (s.values[0], s.values[-1]))
    plain = s["split"] in ("unflatten", "view", "reshape", "permute", "contiguous")
    key_heads = 1 if s["key heads"] != "all" and plain else s.heads
    q, k, v = projections.project(s, query, memory, key_heads)
    q = projections.split(s, q, s.heads)
    k, v = (projections.split(s, x, key_heads) for x in (k, v))
    q, k = projections.change(s, q), projections.change(s, k)
    if key_heads != s.heads:
        k, v = (projections.repeat_heads(s, x) for x in (k, v))
    mask, causal = masks.attention_mask(s, q, k, of_queries, of_keys)
    names = ("query", "key", "value") if s["call"] == "keywords" else ()
    given = [q, k, v]
    words = [f"{n}={x}" for n, x in zip(names, given, strict=False)] or given
    words += [] if mask is None else [f"attn_mask={mask}"]
    words += ["is_causal=True"] if causal else []
    words += ["scale=0.3"] if s["scale"] == "number" else []
    words += ["enable_gqa=True"] if s["key heads"] == "grouped" and plain else []
    call = f"F.scaled_dot_product_attention({', '.join(words)})"
    y = projections.merge(s, s.let(call, "y"), query)
    if s["output"] == "linear":
        y = s.let(f"{s.linear(s.width, s.width)}({y})")
    s.returns(f"{query} + {y}" if s["residual"] == "yes" else y)


KINDS = {
    "attention": Kind(attention, CHOICES, weight=8.0),
    "cross attention": Kind(attention, CHOICES, operands=2, cross=True, weight=2.0),
}
