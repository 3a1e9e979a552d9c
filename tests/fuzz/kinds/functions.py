"""Autograd functions that write, forward and backward, and fused losses in chunks."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

# What a function does with a copy of its operand, or of its gradient, [n, width] or
# [batch, n, width], so that it becomes another value and nothing is left unwritten.
WRITES = {
    "mul_": "{y}.mul_(0.5)",
    "add_": "{y}.add_({y}.clone(), alpha=0.25)",
    "copy_": "{y}.copy_({y}.clone().sin())",
    "masked_fill_": "{y}.masked_fill_({y} > 0.5, 0.5)",
    "columns": "{y}[..., :{half}] = {y}[..., {half}:2 * {half}] * 2",
    "rows": "{y}[..., :{some}, :] = {y}[..., :{some}, :].cos()",
    "every row": "for i in range(0, {y}.shape[-2], {some}):\n"
    "            {y}[..., i : i + {some}, :] = {y}[..., i : i + {some}, :].sin()",
    "one row": "{y}[..., 1, :] *= 3.0",
    "strided rows": "{y}[..., ::2, :] += 0.5",
    "view": "{y}.transpose(-1, -2)[..., :{half}, :].mul_(2.0)",
    "flat view": "{y}.flatten(-2)[..., ::3].mul_(1.5)",
    "index_put_": "{y}.index_put_((torch.tensor([0]),), {y}[1].clone())",
    "scatter_": "{y}.scatter_(-1, torch.zeros_like({y}[..., :1], dtype=torch.long), "
    "0.3)",
    "scatter_add_": "{y}.scatter_add_(-1, torch.ones_like({y}[..., :1], "
    "dtype=torch.long), {y}[..., :1].clone())",
    "new tensor": "e = torch.empty_like({y}); e[..., :{some}, :] = {y}[..., :{some}, "
    ":]; e[..., {some}:, :] = {y}[..., {some}:, :] * 2; {y}.copy_(e)",
}
FUNCTION = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 1.0
        {forward}
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        d = grad * 1.0
        {backward}
        return d + 0.1 * y * grad.abs().sum().tanh()
"""
FUSED = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        d, dw, total = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        words = {words} % weight.shape[0]
        for i in range(0, x.shape[0], {some}):
            own = slice(i, i + {some})
            logits = x[own] @ weight.T
            total += F.cross_entropy(logits, words[own], reduction="sum")
            p = logits.softmax(-1)
            p.scatter_add_(1, words[own, None], -torch.ones_like(p[:, :1]))
            d[own] = p @ weight
            dw.addmm_(p.T, x[own])
        ctx.save_for_backward(d, dw)
        return total / x.shape[0]

    @staticmethod
    def backward(ctx, grad):
        d, dw = ctx.saved_tensors
        n = d.shape[0]
        return d.mul_(grad / n), dw * (grad / n)
"""


def writing(s: Site) -> None:
    """A function with a write in its forward, its backward, or both."""
    x, where, name = s.a, s["where"], s.sheet.fresh("Writing")
    words = {"half": s.width // 2, "some": 2 + s.number(0, 3)}
    write = WRITES[s["how"]]
    forward = write.format(y="y", **words) if where != "backward" else "pass"
    backward = write.format(y="d", **words) if where != "forward" else "pass"
    s.sheet.helper(FUNCTION.format(name=name, forward=forward, backward=backward))
    if s["shape"] == "flattened":
        flat = s.let(f"{x}.reshape(-1, {s.width})")
        s.returns(f"{x} + 0.1 * {name}.apply({flat}).view({x}.shape)")
    else:
        s.returns(f"{x} + 0.1 * {name}.apply({x})")


def fused(s: Site) -> None:
    """A product and a cross entropy, chunk by chunk, scaled into the value."""
    x, name = s.a, s.sheet.fresh("Fused")
    words = {"of tokens": "x.argmax(-1)", "of positions": "torch.arange(x.shape[0])"}
    some = 3 + s.number(0, 9)
    s.sheet.helper(FUSED.format(name=name, some=some, words=words[s["words"]]))
    weight = s.parameter(2 * s.width, s.width)
    flat = s.let(f"{x}.reshape(-1, {s.width})")
    s.returns(f"{x} * (1 + 0.01 * {name}.apply({flat}, {weight}))")


KINDS = {
    "function writes": Kind(
        writing,
        {
            "how": tuple(WRITES),
            "where": ("forward", "backward", "both"),
            "shape": ("flattened", "batched"),
        },
        weight=1.5,
    ),
    "fused loss": Kind(fused, {"words": ("of tokens", "of positions")}, weight=0.6),
}
