"""Masks as models build them: of positions, inputs, buffers; bool or additive."""

from __future__ import annotations

from tests.fuzz.site import Site

PATTERN = ("none", "is_causal", "causal", "tril", "window", "band", "prefix", "chunks",
           "padding", "documents", "restarts", "dense", "buffer", "row by row",
           "triu")  # fmt: skip
ALSO = ("none", "causal", "padding", "window")
FORM = ("bool", "where inf", "masked_fill", "lowest")
BIAS = ("none", "distance", "table", "parameter", "dense")
DIMS = ("two", "four", "expanded")

FORM_CHOICES = {"pattern": PATTERN, "also": ALSO, "form": FORM, "bias": BIAS,
                "dims": DIMS}  # fmt: skip


def attention_mask(
    s: Site, q: str, k: str, of_queries: tuple[int, ...], of_keys: tuple[int, ...]
) -> tuple[str | None, bool]:
    """The text of attn_mask, and is_causal.

    q, k: [..., L, D] and [..., M, D]; of_queries, of_keys: L and M of every call.
    """
    if s["pattern"] == "is_causal" and s["bias"] == "none":
        return None, True
    if s["pattern"] == s["bias"] == "none":
        return None, False
    rows = s.let(f"torch.arange({q}.shape[-2])[:, None]", "rows")
    cols = s.let(f"torch.arange({k}.shape[-2])[None, :]", "cols")
    pattern = "causal" if s["pattern"] == "is_causal" else s["pattern"]
    parts = [_pattern(s, pattern, rows, cols, of_queries, of_keys)]
    if pattern != "none":
        parts.append(_pattern(s, s["also"], rows, cols, of_queries, of_keys))
    seen = [part for part in parts if part]
    bias = _bias(s, q, k, rows, cols)
    if not seen:
        return bias, False
    sees = s.let(" & ".join(f"({part})" for part in seen), "sees")
    if s["form"] == "lowest" and of_queries == of_keys:
        # a row that low numbers hide in whole has gradients of its own
        sees = s.let(f"{sees} | ({rows} == {cols})", "sees")
    mask = s.let(_in_form(s, sees, q, of_queries == of_keys), "mask")
    if bias is not None:
        if s["form"] == "bool":
            mask = s.let(f"{bias}.masked_fill(~{mask}, -torch.inf)", "mask")
        else:
            mask = s.let(f"{mask} + {bias}", "mask")
    return _in_dims(s, mask, q, k), False


def _pattern(
    s: Site,
    name: str,
    rows: str,
    cols: str,
    of_queries: tuple[int, ...],
    of_keys: tuple[int, ...],
) -> str | None:
    """Which keys a row sees: bool [L, M] or [B, 1, L or 1, M], or None for all."""
    size = 2 + s.number(0, 5)
    sides = f"{rows}.shape[0], {cols}.shape[1]"
    if name == "none":
        return None
    if name == "tril":
        return s.let(f"torch.ones({sides}, dtype=torch.bool).tril()")
    if name == "triu":
        return s.let(f"torch.full(({sides}), True).triu(1).logical_not()")
    if name == "window":
        return f"({cols} <= {rows}) & ({rows} - {cols} < {size})"
    if name == "band":
        return f"({rows} - {cols}).abs() < {size}"
    if name == "prefix":
        return f"({cols} <= {rows}) | ({cols} < {size})"
    if name == "chunks":
        return f"{rows} // {size} == {cols} // {size}"
    if name in ("buffer", "row by row", "documents", "restarts") and (
        of_queries != of_keys
    ):
        name = "causal"  # these are of the tokens of one sequence
    if name == "buffer":
        most = max(of_keys) + s.number(1, 2) * 8
        buffer = s.buffer(f"torch.ones({most}, {most}, dtype=torch.bool).tril()")
        return s.let(f"{buffer}[:{rows}.shape[0], :{cols}.shape[1]]")
    if name == "row by row" and len(set(of_keys)) == 1:
        mask = s.let(f"torch.zeros({sides}, dtype=torch.bool)", "mask")
        s.line(f"for row in range({of_keys[0]}):")
        s.line(f"    {mask}[row, : row + 1] = True")
        return mask
    if name in ("padding", "documents", "restarts"):
        return _of_input(s, name, cols, of_keys)
    if name == "dense" and of_queries == of_keys == s.setting.lengths:
        drawn = "(torch.rand(length, length) < 0.5).fill_diagonal_(True)"
        return s.input("dense", drawn, None)
    return f"{cols} <= {rows}"


def _of_input(s: Site, name: str, cols: str, of_keys: tuple[int, ...]) -> str:
    """Padding, documents or positions that start again, which arguments say."""
    if name == "padding":
        ids = s.padding()
    elif name == "documents":
        ids = s.input(name, "(torch.rand(batch, length) < 0.2).cumsum(1)", 1)
    else:
        starts = "max(length // 2, 1)"
        ids = s.input(name, f"torch.arange(length).expand(batch, -1) % {starts}", 1)
    value = name == "padding"
    if of_keys != s.setting.lengths:
        more = f"{cols}.shape[1] - {ids}.shape[1]"
        ids = s.let(f"F.pad({ids}, ({more}, 0), value={value:d})")
    if s["split"] == "folded batch":
        ids = s.let(f"{ids}.repeat_interleave({s.heads}, 0)")
    lead = {"folded batch": "", "one head": "", "five dims": ", None, None"}
    between = lead.get(s["split"], ", None")
    if name == "padding":
        return f"{ids}[:{between}, None, :]"
    if name == "restarts":
        ids = s.let(f"({ids} == 0).cumsum(-1)")
    return f"({ids}[:, :, None] == {ids}[:, None, :])[:{between}]"


def _in_form(s: Site, sees: str, q: str, square: bool) -> str:
    form = s["form"]
    if form == "where inf":
        return f"torch.where({sees}, 0.0, -torch.inf).to({q}.dtype)"
    if form == "masked_fill":
        zeros = f"torch.zeros({sees}.shape, dtype={q}.dtype)"
        return f"{zeros}.masked_fill({sees}.logical_not(), float('-inf'))"
    if form == "lowest" and square:
        return f"(1.0 - {sees}.to({q}.dtype)) * torch.finfo({q}.dtype).min"
    return sees


def _bias(s: Site, q: str, k: str, rows: str, cols: str) -> str | None:
    """An additive bias [heads or 1, L, M], or None."""
    name = s["bias"]
    heads = 1 if s["split"] in ("folded batch", "one head") else s.heads
    if name == "none":
        return None
    if name == "distance":
        slopes = f"0.5 ** torch.arange(1, {heads} + 1, dtype={q}.dtype)"
        slopes = s.let(f"({slopes})[:, None, None]", "slopes")
        return s.let(f"-({rows} - {cols}).abs() * {slopes}", "bias")
    if name == "table":
        table = s.module(f"nn.Embedding(9, {heads})")
        return s.let(
            f"{table}(({rows} - {cols}).clamp(-4, 4) + 4).permute(2, 0, 1)", "bias"
        )
    sides = f"[:, :{rows}.shape[0], :{cols}.shape[1]]"
    most = max(max(value.lengths) for value in s.values)
    if name == "parameter":
        return s.let(s.parameter(heads, most, most) + sides, "bias")
    drawn = f"torch.randn({heads}, {most}, {most})"
    return s.let(s.input(f"bias{heads}x{most}", drawn, None) + sides, "bias")


def _in_dims(s: Site, mask: str, q: str, k: str) -> str:
    """More dimensions in front, and expanded ones."""
    if s["dims"] == "two" or s["split"] != "unflatten":
        return mask
    if s["dims"] == "four":
        return s.let(f"{mask}.view((1,) * (4 - {mask}.dim()) + {mask}.shape)", "mask")
    sides = f"{q}.shape[0], {q}.shape[1], {q}.shape[-2], {k}.shape[-2]"
    return s.let(f"{mask}.expand({sides})", "mask")
