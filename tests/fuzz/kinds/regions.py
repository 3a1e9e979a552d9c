"""Regions around other statements, breaks of the graph, and changes of the length."""

from __future__ import annotations

from tests.fuzz.site import Kind, Scope, Site, class_text


def region(s: Site) -> None:
    """A body inside of something."""
    how = s["how"]
    if how in ("checkpoint", "function"):
        part, x = s.sheet.fresh("part"), s.sheet.fresh("u")
        s.line(f"def {part}({x}):")
        with s.indented():
            s.line(f"return {s.body(x)}")
        call = f"checkpoint({part}, {s.a}, use_reentrant=False)"
        s.returns(call if how == "checkpoint" else f"{part}({s.a})")
        return
    starts = {"no_grad": "with torch.no_grad():",
              "autocast off": 'with torch.autocast("cpu", enabled=False):',
              "enable_grad": "with torch.enable_grad():"}  # fmt: skip
    start = s.let(s.a, "u")
    if how in starts:
        s.line(starts[how])
        with s.indented():
            inside = s.let(s.body(start), "u")
        s.returns(f"{s.a} + {inside}" if how == "no_grad" else inside)
        return
    y = s.body(start)
    s.returns(f"{s.a} + {y}" if how == "residual" else f"{y} * 1.0")


def blocks(s: Site) -> None:
    """The body as a module, of which there are two with parameters of their own."""
    scope, name = Scope(), s.sheet.fresh("Block")
    result = s.body("x", scope)
    s.scope.used |= scope.used
    s.helper(class_text(name, scope, ["x", *scope.used], result))
    number = 1 if s["how"] == "once" else 2
    layers = s.module(f"nn.ModuleList([{name}() for _ in range({number})])")
    x, used = s.let(s.a, "u"), "".join(f", {name}" for name in scope.used)
    s.line(f"for layer in {layers}:")
    call = f"checkpoint(layer, {x}{used}, use_reentrant=False)"
    plain = f"layer({x}{used})"
    s.line(f"    {x} = {call if s['how'] == 'recomputed' else plain}")
    s.returns(x)


def graph_break(s: Site) -> None:
    """A place where Dynamo ends one graph and begins another."""
    s.line("torch._dynamo.graph_break()")
    s.returns(s.a)


def length(s: Site) -> None:
    """A sequence of another length."""
    x, how = s.a, s["how"]
    if how == "class token":
        token = s.parameter(1, 1, s.width)
        new = tuple(n + 1 for n in s.lengths)
        s.returns(f"torch.cat([{token}.expand({x}.shape[0], -1, -1), {x}], 1)", new)
    elif how == "registers":
        tokens = s.parameter(3, s.width)
        new = tuple(n + 3 for n in s.lengths)
        s.returns(f"torch.cat([{x}, {tokens}.repeat({x}.shape[0], 1, 1)], 1)", new)
    elif how == "pool":
        layer = s.module(f"nn.Conv1d({s.width}, {s.width}, 2, stride=2, padding=1)")
        new = tuple(n // 2 + 1 for n in s.lengths)
        s.returns(f"{layer}({x}.transpose(1, 2)).transpose(1, 2)", new)
    elif how == "average":
        new = tuple(-(-n // 2) for n in s.lengths)
        turned = f"{x}.transpose(1, 2)"
        s.returns(f"F.avg_pool1d({turned}, 2, ceil_mode=True).transpose(1, 2)", new)
    elif how == "without first":
        if min(s.lengths) < 4:
            s.returns(x)
            return
        s.returns(f"{x}[:, 1:]", tuple(n - 1 for n in s.lengths))
    elif how == "last":
        new = tuple(min(n, 5) for n in s.lengths)
        s.returns(f"{x}[:, -5:]", new)
    elif how == "padded":
        new = tuple(n + 2 for n in s.lengths)
        s.returns(f"F.pad({x}, (0, 0, 1, 1))", new)
    elif how == "latents":
        number = 4 + s.number(0, 5)
        latents = s.parameter(1, number, s.width)
        new = tuple(number for _ in s.lengths)
        s.returns(
            f"{latents}.expand({x}.shape[0], -1, -1) + {x}.mean(1, keepdim=True)", new
        )
    else:
        new = tuple(2 * n for n in s.lengths)
        layer = s.linear(s.width, 2 * s.width)
        s.returns(f"{layer}({x}).unflatten(-1, (2, -1)).flatten(1, 2)", new)


HOW = ("residual", "checkpoint", "function", "autocast off", "no_grad", "enable_grad")

KINDS = {
    "region": Kind(region, {"how": HOW}, weight=1.5, region=True),
    "blocks": Kind(
        blocks, {"how": ("once", "twice", "recomputed")}, weight=1.5, region=True
    ),
}

BREAK = {"graph break": Kind(graph_break, weight=0.25)}

LENGTH = {
    "length": Kind(
        length,
        {
            "how": ("class token", "registers", "pool", "average", "without first",
                    "last", "padded", "latents", "doubled"),
        },
        weight=1.2,
    ),
}  # fmt: skip
