"""The spellings of q, k and v: how they are projected, split into heads and merged."""

from __future__ import annotations

from tests.fuzz.site import Site

PROJECT = ("separate", "fused chunk", "fused split", "stacked", "einsum", "none",
           "shared", "learned queries", "convolution")  # fmt: skip
SPLIT = {
    "unflatten": "{x}.unflatten(-1, ({heads}, -1)).transpose(1, 2)",
    "view": "{x}.view({x}.shape[0], {x}.shape[1], {heads}, {dim}).transpose(1, 2)",
    "reshape": "{x}.reshape({x}.shape[0], -1, {heads}, {dim}).transpose(1, 2)",
    "permute": "{x}.unflatten(-1, ({heads}, {dim})).permute(0, 2, 1, 3)",
    "folded batch": "{x}.unflatten(-1, ({heads}, -1)).transpose(1, 2).flatten(0, 1)",
    "five dims": "{x}.unflatten(-1, (1, {heads}, {dim})).permute(0, 2, 3, 1, 4)",
    "one head": "{x}",
    "contiguous": "{x}.unflatten(2, ({heads}, -1)).transpose(1, 2).contiguous()",
}
MERGE = {
    "flatten": "{y}.transpose(1, 2).flatten(2)",
    "reshape": "{y}.transpose(1, 2).reshape({batch}, {tokens}, {width})",
    "contiguous view": "{y}.transpose(1, 2).contiguous().view({batch}, {tokens}, -1)",
    "permute": "{y}.permute(0, 2, 1, 3).flatten(2)",
    "einsum": 'torch.einsum("bhtd,hdc->btc", {y}, {weight}) / {root:.3f}',
}
KEY_HEADS = ("all", "grouped", "one", "expanded", "interleaved")
CHANGE = ("none", "rotary", "interleaved rotary", "normed", "scaled")

ROTARY = """
def rotary(x, interleaved):
    # [..., tokens, dim]: rotate pairs by angles that grow with the position
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    rates = 0.5 ** torch.arange(half, dtype=x.dtype, device=x.device)
    angles = places[:, None] * rates
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
    else:
        a, b = x[..., :half], x[..., half:]
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    if interleaved:
        return torch.stack(turned, -1).flatten(-2)
    return torch.cat(turned, -1)
"""


def project(s: Site, query: str, memory: str, key_heads: int) -> tuple[str, str, str]:
    """q [B, L, heads x dim], k and v [B, M, key_heads x dim] of [B, tokens, width]."""
    way, width = s["project"], s.width
    narrow = width // s.heads * key_heads
    if query != memory and way in ("fused chunk", "fused split", "stacked", "shared"):
        way = "separate"
    if narrow != width and way in ("fused chunk", "stacked", "none", "shared"):
        way = "fused split" if query == memory else "separate"
    if way in ("fused chunk", "stacked"):
        joint = s.let(f"{s.linear(width, 3 * width)}({query})")
        if way == "stacked":
            joint = s.let(f"{joint}.unflatten(-1, (3, -1)).unbind(-2)")
        else:
            joint = s.let(f"{joint}.chunk(3, dim=-1)")
        return f"{joint}[0]", f"{joint}[1]", f"{joint}[2]"
    if way == "fused split":
        joint = s.let(f"{s.linear(width, width + 2 * narrow)}({query})")
        q, k, v = (s.sheet.fresh(x) for x in "qkv")
        s.line(f"{q}, {k}, {v} = {joint}.split([{width}, {narrow}, {narrow}], dim=-1)")
        return q, k, v
    if way in ("none", "shared"):
        q = query if way == "none" else s.let(f"{s.linear(width, width)}({query})")
        return q, memory if way == "none" else q, memory if way == "none" else q
    if way == "einsum":
        weights = [s.parameter(width, n) for n in (width, narrow, narrow)]
        q, k, v = (
            s.let(f'torch.einsum("btc,cd->btd", {x}, {w}) / {width**0.5:.3f}')
            for x, w in zip((query, memory, memory), weights, strict=True)
        )
        return q, k, v
    if way == "convolution":
        layer = s.module(f"nn.Conv1d({width}, {width}, 3, padding=1)")
        q = s.let(f"{layer}({query}.transpose(1, 2)).transpose(1, 2)")
    elif way == "learned queries":
        q = s.let(
            f"{s.parameter(1, width)}.expand({query}.shape[0], {query}.shape[1], -1)"
        )
    else:
        q = s.let(f"{s.linear(width, width)}({query})")
    k = s.let(f"{s.linear(width, narrow, bias=False)}({memory})")
    return q, k, s.let(f"{s.linear(width, narrow)}({memory})")


def split(s: Site, x: str, heads: int) -> str:
    """[B, tokens, heads x dim] -> an operand of attention, by choice "split"."""
    text = SPLIT[s["split"]].format(x=x, heads=heads, dim=s.width // s.heads)
    return x if text == x else s.let(text)


def repeat_heads(s: Site, x: str) -> str:
    """Bring fewer key heads [B, heads, tokens, dim] to those of q, as models do."""
    way, times = s["key heads"], s.heads
    if way == "expanded":
        wide = f"{x}[:, :, None].expand(-1, -1, {times}, -1, -1)"
        return s.let(f"{wide}.reshape({x}.shape[0], -1, *{x}.shape[2:])")
    if way == "interleaved":
        return s.let(f"{x}.repeat_interleave({times}, dim=1)")
    return x


def change(s: Site, x: str) -> str:
    """Rotary embeddings or norms of q and k."""
    way = s["change"]
    if way == "none" or (way.endswith("rotary") and s.width // s.heads % 2):
        return x
    if way == "normed":
        return s.let(f"F.normalize({x}, dim=-1) * 2.0")
    if way == "scaled":
        return s.let(f"{x} * 0.7")
    s.helper(ROTARY)
    return s.let(f"rotary({x}, {way.startswith('inter')})")


def merge(s: Site, y: str, like: str) -> str:
    """Attention's result -> [B, tokens, width]; `like` is [B, tokens, ...]."""
    how, width = s["split"], s.width
    batch, tokens = f"{like}.shape[0]", f"{like}.shape[1]"
    if how == "one head":
        return y
    if how == "folded batch":
        y = s.let(f"{y}.unflatten(0, ({batch}, -1))")
    if how == "five dims":
        return s.let(f"{y}.permute(0, 3, 1, 2, 4).reshape({batch}, {tokens}, -1)")
    words = {"batch": batch, "tokens": tokens, "width": width, "root": width**0.5}
    if s["merge"] == "einsum":
        words["weight"] = s.parameter(s.heads, width // s.heads, width)
    return s.let(MERGE[s["merge"]].format(y=y, **words))
