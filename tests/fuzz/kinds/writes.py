"""In-place writes, to clones, to views and to new tensors."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

COPIES = {
    "clone": "{a}.clone()",
    "arithmetic": "{a} * 1.0",
    "contiguous": "{a}.transpose(0, 1).contiguous().transpose(0, 1) + 0",
}
WRITES = {
    "token": "{x}[:, {some}] = 0.5",
    "add": "{x}.add_(1.0)",
    "times": "{x} *= 0.7",
    "last token": "{x}[:, -1] += 1.0",
    "masked_fill": "{x}.masked_fill_({x} > 1.0, 1.0)",
    "slice": "{x}[:, ::2] *= 0.5",
    "channels": "{x}[..., : {half}] = {x}[..., {half} :] * 2",
    "row": "{x}[0] += 0.25",
    "values": "{x}[:, :1] = torch.linspace(-1, 1, {width}, dtype={x}.dtype)",
    "view": "{x}.transpose(1, 2)[:, {place}].mul_(2.0)",
    "flat": "{x}.flatten(0, 1).view(-1, {width})[::3].zero_()",
    "scatter": "{x}.scatter_(1, torch.zeros({x}.shape[0], 1, {width}, "
    "dtype=torch.long), 0.3)",
    "index_add": "{x}.index_add_(1, torch.tensor([0, 0]), {x}[:, :1].repeat(1, 2, 1))",
    "mask": "{x}.mul_((torch.arange({x}.shape[1]) % 2)[None, :, None])",
    "relu": "F.relu({x}, inplace=True)",
    "copy": "{x}[:, 1:].copy_({x}[:, :-1].clone())",
    "fill": "{x}.narrow(1, 0, 1).fill_(0.1)",
}
MADE = {
    "zeros_like": "torch.zeros_like({x})",
    "new_zeros": "{x}.new_zeros({x}.shape)",
    "empty": "torch.empty_like({x})",
}
# Of a mask [S], of it for the whole batch, and of rows [B, n, C].
MASKED = {
    "batch": "{x}[{batch}] = {flat}",
    "tokens": "{x}[:, {tokens}] = {rows}",
    "colon": "{x}[{batch}, :] = {flat}",
    "row": "{x}[{batch}] = {rows}[0, 0]",
    "number": "{x}[:, {tokens}] = 0.5",
    "channels": "{x}[{batch}, 1:] = {flat}[:, 1:]",
    "scatter": "{x} = {x}.masked_scatter({batch}[..., None].expand_as({x}), {rows})",
    "entries": "{x}.masked_scatter_({batch}[..., None] & ({x} > -9), {rows})",
    "put": "{x} = torch.index_put({x}, ({batch},), {flat})",
    "accumulate": "{x}.index_put_(({batch},), {flat}, accumulate=True)",
    "view": "{x}.transpose(0, 1)[{tokens}] = {rows}.transpose(0, 1)",
    "add": "{x}[{batch}] += {flat}",
    "read": "{x} = {x} + {x}[{batch}].square().mean()",
    "map": "{x}[:, {tokens}] = {x}[:, {tokens}].cos() * {rows}",
}
# Of positions [n], of them as indices of rows and of all entries, and of rows.
POSITIONS = {
    "assign": "{x}[:, {at}] = {rows}",
    "number": "{x}[:, {at}] = 0.5",
    "times": "{x}[:, {at}] *= 2.0",
    "add": "{x}[:, {at}] += {rows}",
    "each": "{x}[{each}] = {rows}",
    "put": "{x} = {x}.index_put(({each}), {rows})",
    "accumulate": "{x}.index_put_(({each} * 0), {rows}, accumulate=True)",
    "copy": "{x} = {x}.index_copy(1, {counted}, {rows})",
    "index_add": "{x}.index_add_(1, {at} * 0, {rows})",
    "index_fill": "{x} = {x}.index_fill(1, {at}, 0.25)",
    "scatter": "{x} = {x}.scatter(1, {whole}, {rows})",
    "scatter_add": "{x}.scatter_add_(1, {whole} * 0, {rows})",
    "row": "{x}[0, {at}] = {rows}[0]",
    "channels": "{x}[:, {at}, 1:] = {rows}[..., 1:]",
    "shift": "{x}[:, torch.arange(1, {length})] = {a}[:, torch.arange({length} - 1)]",
}
ROWS = ("tokens", "parameter")


def write(s: Site) -> None:
    """A write to a copy of the operand."""
    place = s.number(0, 3)
    x = s.let(COPIES[s["copy"]].format(a=s.a), "w")
    sizes = {"half": s.width // 2, "width": s.width}
    some = place % min(s.lengths)
    s.line(WRITES[s["how"]].format(x=x, place=place, some=some, **sizes))
    s.returns(x)


def assemble(s: Site) -> None:
    """A new tensor that is filled from the operand."""
    x, out = s.a, s.sheet.fresh("w")
    s.line(f"{out} = {MADE[s['made']].format(x=x)}")
    if s["filled"] == "shifted" and s["made"] != "empty":
        s.line(f"{out}[:, 1:] = {x}[:, :-1]")
    elif s["filled"] == "halves":
        s.line(f"{out}[..., ::2] = {x}[..., ::2].sin()")
        s.line(f"{out}[..., 1::2] = {x}[..., 1::2].cos()")
    elif s["filled"] == "tokens":
        s.line(f"{out}[:, ::2] = {x}[:, ::2]")
        s.line(f"{out}[:, 1::2] = {x}[:, 1::2] * 2")
    elif s["filled"] == "scatter" and s["made"] != "empty":
        s.line(f"{out}.scatter_add_(1, torch.zeros_like({x}, dtype=torch.long), {x})")
    else:
        s.line(f"{out}[:] = {x}")
    s.returns(f"{x} + 0.5 * {out}")


def _rows(s: Site, x: str, n: int) -> str:
    """What is written: rows [B, n, C] of the operand, or of a parameter."""
    parameter = s.parameter(n, s.width)
    if s["rows"] == "tokens":
        return s.let(f"{s.a}[:, :{n}].sin()", "r")
    return s.let(f"{parameter}.expand({x}.shape[0], -1, -1)", "r")


def masked(s: Site) -> None:
    """Rows that are written where a mask is True."""
    x = s.let(f"{s.a} * 1.0", "w")
    n = 3 if min(s.lengths) > 2 else 1
    positions = s.let(f"torch.arange({x}.shape[1])", "p")
    length = f"{x}.shape[1]"
    spread = f"({positions} == {length} - 1)"
    if n > 1:
        spread += f" | ({positions} == 0) | ({positions} == {length} // 2)"
    tokens = s.let(spread if s["mask"] == "spread" else f"{positions} < {n}", "m")
    batch, rows = f"{tokens}.expand({x}.shape[0], -1)", _rows(s, x, n)
    flat = f"{rows}.reshape(-1, {s.width})"
    words = {"tokens": tokens, "batch": batch, "rows": rows, "flat": flat}
    s.line(MASKED[s["how"]].format(x=x, **words))
    s.returns(x)


def positions(s: Site) -> None:
    """Rows that are written at positions, the same or others for each sequence."""
    x = s.let(f"{s.a} * 1.0", "w")
    shortest = min(s.lengths)
    n, last = (2, shortest - 1) if shortest > 1 else (1, 0)
    at = {
        "numbers": f"torch.tensor({[last, 0][:n]})",
        "from the end": f"torch.tensor({[-1, 0][:n]})",
        "range": f"torch.arange({n})",
        "one": "torch.tensor([0])",
    }[s["at"]]
    at = s.let(at, "p")
    rows = _rows(s, x, 1 if s["at"] == "one" else n)
    batch, length = f"{x}.shape[0]", f"{x}.shape[1]"
    counted = f"{at}.remainder({length})"
    words = {
        "each": f"torch.arange({batch})[:, None], {at}[None]",
        "whole": f"{counted}[None, :, None].expand({batch}, -1, {s.width})",
    }
    words |= {"at": at, "rows": rows, "counted": counted, "length": length}
    s.line(POSITIONS[s["how"]].format(x=x, a=s.a, **words))
    s.returns(x)


KINDS = {
    "positions": Kind(
        positions,
        {
            "how": tuple(POSITIONS),
            "at": ("numbers", "from the end", "range", "one"),
            "rows": ROWS,
        },
        weight=1.2,
    ),
    "masked": Kind(
        masked,
        {"how": tuple(MASKED), "mask": ("first", "spread"), "rows": ROWS},
        weight=1.2,
    ),
    "write": Kind(write, {"how": tuple(WRITES), "copy": tuple(COPIES)}, weight=1.5),
    "assemble": Kind(
        assemble,
        {
            "made": tuple(MADE),
            "filled": ("all", "shifted", "halves", "tokens", "scatter"),
        },
        weight=0.8,
    ),
}
