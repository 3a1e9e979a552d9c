"""Attention in torch's own modules, and caches of keys."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

MHA = {
    "form": ("batch first", "sequence first"),
    "mask": ("none", "causal", "float causal", "padding"),
    "weights": ("False", "True"),
    "residual": ("yes", "no"),
    "after": ("plain", "linear"),
}
LAYER = {"form": MHA["form"], "norm": ("after", "before"), "mask": MHA["mask"]}


def _masked(s: Site, keys: str, name: str) -> list[str]:
    """Keyword arguments that hide keys."""
    lengths = f"{s.a}.shape[1], {keys}.shape[1]"
    if s["mask"] == "causal":
        return [f"{name}=torch.ones({lengths}, dtype=torch.bool).triu(1)"]
    if s["mask"] == "float causal":
        inf = f"torch.full(({lengths}), -torch.inf, dtype={s.a}.dtype)"
        return [f"{name}={inf}.triu(1)"]
    same = s.values[-1].lengths == s.setting.lengths
    if s["mask"] == "padding" and same and name != "tgt_mask":
        padding = s.padding()
        names = {"attn_mask": "key_padding_mask", "src_mask": "src_key_padding_mask"}
        return [f"{names[name]}=~{padding}"]
    return []


def multihead(s: Site) -> None:
    """nn.MultiheadAttention, of one sequence or of two."""
    first = s["form"] == "batch first"
    layer = s.module(
        f"nn.MultiheadAttention({s.width}, {s.heads}, batch_first={first})"
    )
    q, k = (s.a, s.b) if first else (f"{s.a}.transpose(0, 1)", f"{s.b}.transpose(0, 1)")
    words = [q, k, k, *_masked(s, s.b, "attn_mask"), f"need_weights={s['weights']}"]
    y = s.let(f"{layer}({', '.join(words)})[0]")
    y = y if first else s.let(f"{y}.transpose(0, 1)")
    if s["after"] == "linear":
        y = s.let(f"{s.linear(s.width, s.width)}({y})")
    s.returns(f"{s.a} + {y}" if s["residual"] == "yes" else y)


def encoder_layer(s: Site) -> None:
    """nn.TransformerEncoderLayer."""
    first, before = s["form"] == "batch first", s["norm"] == "before"
    words = f"{s.width}, {s.heads}, {2 * s.width}, dropout=0.0"
    layer = s.module(
        f"nn.TransformerEncoderLayer({words}, batch_first={first}, norm_first={before})"
    )
    x = s.a if first else f"{s.a}.transpose(0, 1)"
    y = f"{layer}({', '.join([x, *_masked(s, s.a, 'src_mask')])})"
    s.returns(y if first else f"{y}.transpose(0, 1)")


def decoder_layer(s: Site) -> None:
    """nn.TransformerDecoderLayer on two sequences."""
    words = f"{s.width}, {s.heads}, {2 * s.width}, dropout=0.0"
    layer = s.module(f"nn.TransformerDecoderLayer({words}, batch_first=True)")
    masks = _masked(s, s.a, "tgt_mask") if s["mask"] != "padding" else []
    s.returns(f"{layer}({', '.join([s.a, s.b, *masks])})")


def cache(s: Site) -> None:
    """Attention over a cache that this call writes to, as in generation."""
    most, dim = max(s.lengths) + 4, s.width // s.heads
    shape = f"{s.setting.batch}, {s.heads}, {most}, {dim}"
    keys, values = (s.buffer(f"torch.zeros({shape})") for _ in "kv")
    heads = f".unflatten(-1, ({s.heads}, -1)).transpose(1, 2)"
    q, k, v = (s.let(f"{s.linear(s.width, s.width)}({s.a}){heads}") for _ in "qkv")
    start = s.number(0, 4) if s["start"] == "later" else 0
    end = f"{start} + {s.a}.shape[1]"
    stop = s.let(end)
    for store, new in ((keys, k), (values, v)):
        if s["write"] == "slice":
            s.line(f"{store}[:, :, {start}:{stop}] = {new}.detach()")
        else:
            index = f"torch.arange({start}, {stop})"
            s.line(f"{store}.index_copy_(2, {index}, {new}.detach())")
    rows = f"torch.arange({start}, {stop})[:, None]"
    if s["read"] == "slice":
        keys, values = (f"{x}[:, :, :{stop}]" for x in (keys, values))
        cols = f"torch.arange({stop})"
    else:
        cols = f"torch.arange({most})"
    mask = s.let(f"{cols} <= {rows}", "mask")
    y = f"F.scaled_dot_product_attention({q}, {keys}, {values}, attn_mask={mask})"
    s.returns(f"{s.a} + {y}.transpose(1, 2).flatten(2)")


KINDS = {
    "multihead": Kind(multihead, MHA, weight=1.5),
    "cross multihead": Kind(multihead, MHA, operands=2, cross=True, weight=0.7),
    "encoder layer": Kind(encoder_layer, LAYER, weight=0.8),
    "decoder layer": Kind(
        decoder_layer, {"mask": MHA["mask"]}, operands=2, cross=True, weight=0.5
    ),
    "cache": Kind(
        cache,
        {
            "start": ("zero", "later"),
            "write": ("slice", "index_copy"),
            "read": ("slice", "all"),
        },
        weight=0.3,
    ),
}
