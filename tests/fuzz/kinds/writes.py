"""In-place writes, to clones, to views and to new tensors."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site


def write(s: Site) -> None:
    """A write to a copy of the operand."""
    how, place = s["how"], s.number(0, 3)
    copies = {
        "clone": f"{s.a}.clone()",
        "arithmetic": f"{s.a} * 1.0",
        "contiguous": f"{s.a}.transpose(0, 1).contiguous().transpose(0, 1) + 0",
    }
    x = s.let(copies[s["copy"]], "w")
    value = f"torch.linspace(-1, 1, {s.width}, dtype={x}.dtype)"
    first = f"torch.zeros({x}.shape[0], 1, {s.width}, dtype=torch.long)"
    twice = f"{x}[:, :1].repeat(1, 2, 1)"
    lines = {
        "token": f"{x}[:, {place % min(s.lengths)}] = 0.5",
        "add": f"{x}.add_(1.0)",
        "times": f"{x} *= 0.7",
        "last token": f"{x}[:, -1] += 1.0",
        "masked_fill": f"{x}.masked_fill_({x} > 1.0, 1.0)",
        "slice": f"{x}[:, ::2] *= 0.5",
        "channels": f"{x}[..., : {s.width // 2}] = {x}[..., {s.width // 2} :] * 2",
        "row": f"{x}[0] += 0.25",
        "values": f"{x}[:, :1] = {value}",
        "view": f"{x}.transpose(1, 2)[:, {place}].mul_(2.0)",
        "flat": f"{x}.flatten(0, 1).view(-1, {s.width})[::3].zero_()",
        "scatter": f"{x}.scatter_(1, {first}, 0.3)",
        "index_add": f"{x}.index_add_(1, torch.tensor([0, 0]), {twice})",
        "mask": f"{x}.mul_((torch.arange({x}.shape[1]) % 2)[None, :, None])",
        "relu": f"F.relu({x}, inplace=True)",
        "copy": f"{x}[:, 1:].copy_({x}[:, :-1].clone())",
        "fill": f"{x}.narrow(1, 0, 1).fill_(0.1)",
    }  # fmt: skip
    s.line(lines[how])
    s.returns(x)


def assemble(s: Site) -> None:
    """A new tensor that is filled from the operand."""
    x, out = s.a, s.sheet.fresh("w")
    made = {
        "zeros_like": f"torch.zeros_like({x})",
        "new_zeros": f"{x}.new_zeros({x}.shape)",
        "empty": f"torch.empty_like({x})",
    }
    s.line(f"{out} = {made[s['made']]}")
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
    batch = f"{tokens}.expand({x}.shape[0], -1)"
    rows = {
        "tokens": f"{s.a}[:, :{n}].sin()",
        "parameter": f"{s.parameter(n, s.width)}.expand({x}.shape[0], -1, -1)",
    }[s["rows"]]
    rows = s.let(rows, "r")
    flat = f"{rows}.reshape(-1, {s.width})"
    channels = f"{batch}[..., None].expand_as({x})"
    lines = {
        "batch": f"{x}[{batch}] = {flat}",
        "tokens": f"{x}[:, {tokens}] = {rows}",
        "colon": f"{x}[{batch}, :] = {flat}",
        "row": f"{x}[{batch}] = {rows}[0, 0]",
        "number": f"{x}[:, {tokens}] = 0.5",
        "channels": f"{x}[{batch}, 1:] = {flat}[:, 1:]",
        "scatter": f"{x} = {x}.masked_scatter({channels}, {rows})",
        "entries": f"{x}.masked_scatter_({batch}[..., None] & ({x} > -9), {rows})",
        "put": f"{x} = torch.index_put({x}, ({batch},), {flat})",
        "accumulate": f"{x}.index_put_(({batch},), {flat}, accumulate=True)",
        "view": f"{x}.transpose(0, 1)[{tokens}] = {rows}.transpose(0, 1)",
        "add": f"{x}[{batch}] += {flat}",
        "read": f"{x} = {x} + {x}[{batch}].square().mean()",
        "map": f"{x}[:, {tokens}] = {x}[:, {tokens}].cos() * {rows}",
    }  # fmt: skip
    s.line(lines[s["how"]])
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
    k = 1 if s["at"] == "one" else n
    rows = {
        "tokens": f"{s.a}[:, :{k}].sin()",
        "parameter": f"{s.parameter(k, s.width)}.expand({x}.shape[0], -1, -1)",
    }[s["rows"]]
    rows = s.let(rows, "r")
    batch, length = f"{x}.shape[0]", f"{x}.shape[1]"
    each = f"torch.arange({batch})[:, None], {at}[None]"
    counted = f"{at}.remainder({length})"
    whole = f"{counted}[None, :, None].expand({batch}, -1, {s.width})"
    ranges = f"torch.arange(1, {length})", f"torch.arange({length} - 1)"
    lines = {
        "assign": f"{x}[:, {at}] = {rows}",
        "number": f"{x}[:, {at}] = 0.5",
        "times": f"{x}[:, {at}] *= 2.0",
        "add": f"{x}[:, {at}] += {rows}",
        "each": f"{x}[{each}] = {rows}",
        "put": f"{x} = {x}.index_put(({each}), {rows})",
        "accumulate": f"{x}.index_put_(({each} * 0), {rows}, accumulate=True)",
        "copy": f"{x} = {x}.index_copy(1, {counted}, {rows})",
        "index_add": f"{x}.index_add_(1, {at} * 0, {rows})",
        "index_fill": f"{x} = {x}.index_fill(1, {at}, 0.25)",
        "scatter": f"{x} = {x}.scatter(1, {whole}, {rows})",
        "scatter_add": f"{x}.scatter_add_(1, {whole} * 0, {rows})",
        "row": f"{x}[0, {at}] = {rows}[0]",
        "channels": f"{x}[:, {at}, 1:] = {rows}[..., 1:]",
        "shift": f"{x}[:, {ranges[0]}] = {s.a}[:, {ranges[1]}]",
    }  # fmt: skip
    s.line(lines[s["how"]])
    s.returns(x)


KINDS = {
    "positions": Kind(
        positions,
        {
            "how": ("assign", "number", "times", "add", "each", "put", "accumulate",
                    "copy", "index_add", "index_fill", "scatter", "scatter_add", "row",
                    "channels", "shift"),
            "at": ("numbers", "from the end", "range", "one"),
            "rows": ("tokens", "parameter"),
        },
        weight=1.2,
    ),
    "masked": Kind(
        masked,
        {
            "how": ("batch", "tokens", "colon", "row", "number", "channels", "scatter",
                    "entries", "put", "accumulate", "view", "add", "read", "map"),
            "mask": ("first", "spread"),
            "rows": ("tokens", "parameter"),
        },
        weight=1.2,
    ),
    "write": Kind(
        write,
        {
            "how": ("token", "add", "times", "last token", "masked_fill", "slice",
                    "channels", "row", "values", "view", "flat", "scatter", "index_add",
                    "mask", "relu", "copy", "fill"),
            "copy": ("clone", "arithmetic", "contiguous"),
        },
        weight=1.5,
    ),
    "assemble": Kind(
        assemble,
        {
            "made": ("zeros_like", "new_zeros", "empty"),
            "filled": ("all", "shifted", "halves", "tokens", "scatter"),
        },
        weight=0.8,
    ),
}  # fmt: skip
