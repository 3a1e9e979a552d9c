"""Autograd functions: with writes, in chunks, and with objects and weights of a class.

The weights are tensors of a class of their own, as quantised ones are.
"""

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

SETTINGS = """
class {name}Settings({base}):
    scale: float = 0.5
    power: int = 2


@torch._dynamo.allow_in_graph
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings):
        ctx.save_for_backward(x)
        ctx.settings = settings
        return (x * settings.scale).tanh() {across}

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        y = (x * ctx.settings.scale).tanh()
        return {gradient} * (1 - y**ctx.settings.power) * ctx.settings.scale, None
"""
OF_A_CLASS = """
class OfAClass(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, others, size, stride):
        return cls(parts["data_"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            plain = args[1].data_.to(args[1].scale.dtype) * args[1].scale
            return F.linear(args[0], plain, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (x, *rest), kwargs = args, kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(x.data_), func(x.scale))
        if func is aten._to_copy.default:
            return cls(x.data_, x.scale.to(**kwargs))
        if func is aten.mul_.Tensor:
            x.scale.mul_(*rest)
            return x
        raise NotImplementedError(func)


def of_a_class(rows, columns):
    data = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    weight = OfAClass(data, torch.rand(rows, columns) / 127 / columns**0.5)
    return nn.Parameter(weight, requires_grad=False)
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


def settings(s: Site) -> None:
    """A function in the graph that takes an object."""
    name, tuples = s.sheet.fresh("Set"), s["object"] == "named tuple"
    base = "__import__('typing').NamedTuple" if tuples else "object"
    flips = s["reads"] == "all tokens"
    text = SETTINGS.format(
        name=name,
        base=base,
        across="".join([".flip(1)"] * flips),
        gradient="grad.flip(1)" if flips else "grad",
    )
    if not tuples:
        text = text.replace(
            f"class {name}Settings(object)",
            f"@__import__('dataclasses').dataclass(frozen=True)\nclass {name}Settings",
        )
    s.helper(text)
    s.helper(f"{name.upper()} = {name}Settings()")
    s.returns(f"{s.a} + {name}.apply({s.a}, {name.upper()})")


def weights(s: Site) -> None:
    """A layer whose frozen weight is a tensor of a class of its own."""
    s.helper(OF_A_CLASS)
    weight = s.module(f"of_a_class({s.width}, {s.width})")
    bias = f", {s.parameter(s.width)}" if s["bias"] == "yes" else ""
    s.returns(f"{s.a} + F.linear({s.a}, {weight}{bias})")


KINDS = {
    "settings object": Kind(
        settings,
        {"object": ("dataclass", "named tuple"), "reads": ("tokens", "all tokens")},
        weight=0.6,
    ),
    "weight of a class": Kind(weights, {"bias": ("no", "yes")}, weight=0.6),
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
