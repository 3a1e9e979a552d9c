"""Chains of views and of calls on them: shapes wander off and come back.

A chain is a region whose statements know the dimensions that the value has by then.
Each may change them, and then says how to undo that; after the last one everything is
undone in reverse. Which dimensions a statement takes is its numbers modulo how many
there are, so that a chain stays valid if statements are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.site import Kind, Site

Sizes = tuple[int, ...]  # of one dimension, in every call


@dataclass
class Wandering:
    """A value on its way.

    dims: the sizes of its dimensions in every call; equal in all calls but for tokens.
    undo: how to come back, the last one first to be called; each gets the variable.
    """

    site: Site
    text: str
    dims: list[Sizes]
    undo: list[Callable[[str], str]]

    def then(self, expression: str) -> None:
        """Go on with the value of `expression`."""
        self.text = self.site.let(expression)

    def size(self, dim: int) -> str:
        """The text of a size: a number, or a variable where calls differ."""
        sizes = self.dims[dim]
        if len(set(sizes)) == 1:
            return str(sizes[0])
        return self.site.let(f"{self.text}.shape[{dim}]", "n")


def _transpose(w: Wandering, i: int, j: int) -> None:
    w.then(f"{w.text}.transpose({i}, {j})")
    w.dims[i], w.dims[j] = w.dims[j], w.dims[i]
    w.undo.append(lambda x: f"{x}.transpose({i}, {j})")


def _permute(w: Wandering, i: int, j: int) -> None:
    n = len(w.dims)
    order = [(k + 1 + j) % n for k in range(n)]
    back = [order.index(k) for k in range(n)]
    w.then(f"{w.text}.permute({', '.join(map(str, order))})")
    w.dims = [w.dims[k] for k in order]
    w.undo.append(lambda x: f"{x}.permute({', '.join(map(str, back))})")


def _flatten(w: Wandering, i: int, j: int) -> None:
    if len(w.dims) < 3:
        return
    i = min(i, len(w.dims) - 2)
    first, second = w.dims[i], w.dims[i + 1]
    known = w.size(i)
    if j % 2:
        shape = [str(d[0]) if len(set(d)) == 1 else "" for d in w.dims]
        merged = [*shape[:i], "-1", *shape[i + 2 :]]
        if "" not in merged:
            w.then(f"{w.text}.reshape({', '.join(merged)})")
        else:
            w.then(f"{w.text}.flatten({i}, {i + 1})")
    else:
        w.then(f"{w.text}.flatten({i}, {i + 1})")
    product = tuple(a * b for a, b in zip(first, second, strict=True))
    w.dims[i : i + 2] = [product]
    w.undo.append(lambda x: f"{x}.unflatten({i}, ({known}, -1))")


def _unflatten(w: Wandering, i: int, j: int) -> None:
    parts = 2 + j % 3
    if len(w.dims) > 5 or any(size % parts for size in w.dims[i]):
        return
    rest = tuple(size // parts for size in w.dims[i])
    if j % 2:
        w.then(f"{w.text}.unflatten({i}, (-1, {parts}))")
        w.dims[i : i + 1] = [rest, (parts,) * len(rest)]
    else:
        w.then(f"{w.text}.unflatten({i}, ({parts}, -1))")
        w.dims[i : i + 1] = [(parts,) * len(rest), rest]
    w.undo.append(lambda x: f"{x}.flatten({i}, {i + 1})")


def _unsqueeze(w: Wandering, i: int, j: int) -> None:
    if len(w.dims) > 5:
        return
    w.then(f"{w.text}.unsqueeze({i})")
    w.dims.insert(i, (1,) * len(w.dims[0]))
    w.undo.append(lambda x: f"{x}.squeeze({i})")


def _expand(w: Wandering, i: int, j: int) -> None:
    if len(w.dims) > 5:
        return
    sizes = ["-1"] * len(w.dims)
    sizes.insert(i, "2")
    w.then(f"{w.text}.unsqueeze({i}).expand({', '.join(sizes)})")
    w.dims.insert(i, (2,) * len(w.dims[0]))
    w.undo.append(lambda x: f"{x}.mean({i})")


def _pad(w: Wandering, i: int, j: int) -> None:
    dim, before = len(w.dims) - 1 - i, j % 2
    zeros = ", ".join(["0"] * (2 * dim))
    pads = f"{zeros}, {before}, 1" if zeros else f"{before}, 1"
    length = w.size(i)
    w.then(f"F.pad({w.text}, ({pads}))")
    w.dims[i] = tuple(size + before + 1 for size in w.dims[i])
    w.undo.append(lambda x: f"{x}.narrow({i}, {before}, {length})")


def _narrow(w: Wandering, i: int, j: int) -> None:
    if min(w.dims[i]) < 2:
        return
    index = ", ".join([":"] * i + ["1:"])
    first = w.site.let(f"{w.text}.narrow({i}, 0, 1)")
    w.then(f"{w.text}[{index}]")
    w.dims[i] = tuple(size - 1 for size in w.dims[i])
    w.undo.append(
        lambda x: f"torch.cat([{first}.expand_as({x}.narrow({i}, 0, 1)), {x}], {i})"
    )


def _plain(text: str, least: int = 1) -> Callable[[Wandering, int, int], None]:
    """A call that keeps the shape; {x}, {i}, {j} are filled in."""

    def apply(w: Wandering, i: int, j: int) -> None:
        if min(w.dims[i]) >= least:
            w.then(text.format(x=w.text, i=i, j=1 + j % 2, n=w.size(i)))

    return apply


def _linspace(w: Wandering, i: int, j: int) -> None:
    ones = ", ".join(["1"] * (len(w.dims) - 1 - i))
    shape = f"(-1, {ones})" if ones else "(-1,)"
    w.then(
        f"{w.text} * torch.linspace(0.5, 1.5, {w.size(i)}, dtype={w.text}.dtype)"
        f".view{shape}"
    )


def _matrix(w: Wandering, i: int, j: int) -> None:
    sizes = w.dims[i]
    if len(set(sizes)) > 1 or sizes[0] > 32 or len(w.site.setting.lengths) > 1:
        return
    weight = w.site.parameter(sizes[0], sizes[0])
    y = f"({w.text}.movedim({i}, -1) @ {weight}).movedim(-1, {i})"
    w.then(f"{w.text} + 0.1 * {y}")


STEPS: dict[str, Callable[[Wandering, int, int], None]] = {
    "transpose": _transpose,
    "permute": _permute,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "pad": _pad,
    "narrow": _narrow,
    "linspace": _linspace,
    "matrix": _matrix,
    "roll": _plain("{x}.roll({j}, {i})"),
    "flip": _plain("{x}.flip({i})"),
    "split": _plain("torch.cat([p * 0.9 for p in {x}.split({j}, {i})][::-1], {i})", 2),
    "chunk": _plain("torch.cat([p.sin() for p in {x}.chunk(2, {i})], {i})", 2),
    "cumsum": _plain("{x}.cumsum({i}) * 0.3"),
    "softmax": _plain("{x}.softmax({i}) + 0.5 * {x}"),
    "sort": _plain("{x}.sort({i})[0]"),
    "mean": _plain("{x} - {x}.mean({i}, keepdim=True)"),
    "amax": _plain("{x} - 0.5 * {x}.amax({i}, keepdim=True)"),
    "sum": _plain("{x} + 0.1 * {x}.sum({i}, keepdim=True).expand_as({x})"),
    "logsumexp": _plain("{x} - 0.2 * {x}.logsumexp({i}, True)"),
    "gather": _plain("{x}.index_select({i}, torch.arange({n} - 1, -1, -1))"),
    "contiguous": _plain("{x}.contiguous().sin()"),
    "sin": _plain("{x}.sin()"),
    "write": _plain("{x}.clone().index_fill_({i}, torch.tensor([0]), 0.5)"),
    "max": _plain("{x} * ({x} == {x}.max({i}, True)[0])"),
    "where": _plain("torch.where({x} > 0, {x}.roll(1, {i}), {x})"),
    "select": _plain("{x} + 0.3 * {x}.select({i}, 0).unsqueeze({i})"),
    "unbind": _plain("torch.stack({x}.unbind({i}), {i}).cos()"),
    "view": _plain("{x}.contiguous().view(-1).view({x}.shape)"),
    "repeat": _plain(
        "{x}.repeat_interleave(2, {i}).unflatten({i}, (-1, 2)).mean({i} + 1)"
    ),
}  # fmt: skip


def chain(s: Site) -> None:
    """The region: all steps, and back."""
    calls = len(s.setting.lengths)
    dims = [(s.setting.batch,) * calls, s.lengths, (s.width,) * calls]
    w = Wandering(s, s.a, dims, [])
    for step in s.statement.body:
        i, j = step.numbers[0] % len(w.dims), step.numbers[1] % len(w.dims)
        STEPS[step.kind](w, i, j)
    for undo in reversed(w.undo):
        w.then(undo(w.text))
    s.returns(f"{s.a} + {w.text}" if s["residual"] == "yes" else w.text)


KINDS = {
    "views": Kind(chain, {"residual": ("no", "yes")}, weight=4.0, region=True),
}
