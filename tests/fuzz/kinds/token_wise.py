"""What treats every token alike: norms, MLPs, activations, dropout, mixtures."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

ACTIVATION = ("F.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid",
              "F.softplus")  # fmt: skip

DOUBLED = """
class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 0.1 * x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + 0.3 * x**2)
"""


def norm(s: Site) -> None:
    """Norms over the width, and over tokens and batch."""
    how, x, width = s["how"], s.a, s.width
    if how == "rms by hand":
        gain = s.parameter(width)
        s.returns(
            f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * {gain}"
        )
    elif how == "layer by hand":
        mean = s.let(f"{x}.mean(-1, keepdim=True)")
        s.returns(f"({x} - {mean}) / ({x}.var(-1, False, keepdim=True) + 1e-5).sqrt()")
    elif how in ("nn.BatchNorm1d", "nn.GroupNorm", "nn.InstanceNorm1d"):
        words = f"2, {width}" if how == "nn.GroupNorm" else f"{width}"
        s.returns(f"{s.module(f'{how}({words})')}({x}.transpose(1, 2)).transpose(1, 2)")
    elif how == "F.layer_norm":
        s.returns(f"F.layer_norm({x}, {x}.shape[-1:])")
    else:
        s.returns(f"{s.module(f'{how}({width})')}({x})")


def mlp(s: Site) -> None:
    """Feed-forward blocks."""
    how, x, width, act = s["how"], s.a, s.width, s["activation"]
    if how == "gated":
        both = s.let(f"{s.linear(width, 4 * width, bias=False)}({x}).chunk(2, -1)")
        y = f"{s.linear(2 * width, width)}({act}({both}[0]) * {both}[1])"
    elif how == "sequential":
        name = {"F.relu": "nn.ReLU()", "F.gelu": "nn.GELU()"}.get(act, "nn.SiLU()")
        layers = f"nn.Linear({width}, {width}), {name}, nn.Linear({width}, {width})"
        y = f"{s.module(f'nn.Sequential({layers})')}({x})"
    elif how == "flattened":
        flat = s.let(f"{x}.reshape(-1, {width})")
        y = f"{act}({s.linear(width, width)}({flat})).view({x}.shape)"
    elif how == "bilinear":
        one, other = (f"{s.linear(width, width)}({x})" for _ in "ab")
        y = f"{one} * torch.sigmoid({other})"
    elif how == "tied":
        layer = s.linear(width, width, bias=False)
        y = f"F.linear({act}({layer}({x})), {layer}.weight.t())"
    elif how == "convolution":
        layer = s.module(f"nn.Conv1d({width}, {width}, 1)")
        y = f"{act}({layer}({x}.transpose(1, 2))).transpose(1, 2)"
    else:
        hidden = s.let(f"{act}({s.linear(width, 2 * width)}({x}))")
        y = f"{s.linear(2 * width, width)}({hidden})"
    s.returns(f"{x} + {y}" if s["residual"] == "yes" else y)


def elementwise(s: Site) -> None:
    """Arithmetic on one value."""
    how, x = s["how"], s.a
    if how == "function":
        s.helper(DOUBLED)
        s.returns(f"Cubed.apply({x})")
        return
    if how == "gain":
        s.returns(f"{x} * {s.parameter(s.width)}")
        return
    texts = {
        "scale": f"{x} * 0.5 + 1.0",
        "clamp": f"{x}.clamp(-2.0, 2.0)",
        "where": f"torch.where({x} > 0, {x}, {x} * 0.1)",
        "softmax": f"torch.softmax({x}, -1)",
        "norm": f"{x} / ({x}.norm(dim=-1, keepdim=True) + 0.1)",
        "detach": f"{x} - 0.5 * {x}.detach()",
        "cast": f"{x} + {x}.double().sin().to({x}.dtype)",
        "abs": f"{x}.abs().sqrt().clamp(min=0.3)",
        "channel sort": f"{x}.sort(-1, descending=True)[0]",
        "channel topk": f"{x} + {x}.topk(2, dim=-1)[0].sum(-1, keepdim=True)",
        "channel cumsum": f"{x}.cumsum(-1) / 4",
        "vmap": f"torch.func.vmap(lambda u: u * 2 + 1)({x})",
    }
    s.returns(texts[how])


def dropout(s: Site) -> None:
    """Random numbers, seeded alike in every run."""
    s.draws()
    if s["how"] == "module":
        s.returns(f"{s.module('nn.Dropout(0.25)')}({s.a})")
    elif s["how"] == "noise":
        s.returns(f"{s.a} + 0.1 * torch.randn_like({s.a})")
    else:
        s.returns(f"F.dropout({s.a}, 0.25, self.training)")


def experts(s: Site) -> None:
    """A mixture of experts: every expert on all tokens, or on those routed to it."""
    x, width = s.a, s.width
    gate = s.let(f"{s.linear(width, 3, bias=False)}({x}).softmax(-1)")
    weights, chosen = s.sheet.fresh("weights"), s.sheet.fresh("chosen")
    s.line(f"{weights}, {chosen} = {gate}.topk(2, dim=-1)")
    if s["how"] == "dense":
        layers = [s.linear(width, width) for _ in range(3)]
        every = s.let(f"torch.stack([{', '.join(f'{m}({x})' for m in layers)}], -2)")
        index = f"{chosen}[..., None].expand(-1, -1, -1, {width})"
        s.returns(f"{x} + ({every}.gather(-2, {index}) * {weights}[..., None]).sum(-2)")
        return
    flat = s.let(f"{x}.reshape(-1, {width})")
    total = s.let(f"torch.zeros_like({flat})")
    for number in range(3):
        layer = s.linear(width, width)
        hit = s.let(f"({chosen}.reshape(-1, 2) == {number}).to({x}.dtype)")
        share = s.let(f"({hit} * {weights}.reshape(-1, 2)).sum(-1, keepdim=True)")
        s.line(f"{total} = {total} + {layer}({flat}) * {share}")
    s.returns(f"{x} + {total}.view_as({x})")


def changing(s: Site) -> None:
    """A float of the model that is another one in every call."""
    x, rate, how = s.a, "self.rate", s["how"]  # who calls the model sets it
    texts = {
        "times": f"{x} * {rate}",
        "divided": f"{x} / {rate}",
        "mixed": f"{x} * (1 - {rate}) + {x}.tanh() * {rate}",
        "added": f"{x} + {rate} * {x}.square().mean()",
        "compared": f"torch.where({x} > {rate}, {x}, {x} * 0.5)",
        "power": f"{x}.abs().clamp(min=0.1) ** {rate}",
        "clamp": f"{x}.clamp(-{rate}, {rate})",
        "lerp": f"torch.lerp({x}, {x}.tanh(), {rate})",
        "alpha": f"torch.add({x}, {x}.sin(), alpha={rate})",
        "scale": f"F.scaled_dot_product_attention({x}, {x}, {x}, scale={rate})",
        "dropout": f"F.dropout({x}, {rate}, self.training)",
    }
    s.sheet.drawn |= how == "dropout"
    s.returns(texts[how])


KINDS = {
    "changing": Kind(
        changing,
        {
            "how": ("times", "divided", "mixed", "added", "compared", "power", "clamp",
                    "lerp", "alpha", "scale", "dropout"),
        },
        weight=0.5,
    ),
    "norm": Kind(
        norm,
        {
            "how": ("nn.LayerNorm", "nn.RMSNorm", "rms by hand", "layer by hand",
                    "F.layer_norm", "nn.BatchNorm1d", "nn.GroupNorm",
                    "nn.InstanceNorm1d"),
        },
        weight=2.0,
    ),
    "mlp": Kind(
        mlp,
        {
            "how": ("plain", "gated", "sequential", "flattened", "bilinear", "tied",
                    "convolution"),
            "activation": ACTIVATION,
            "residual": ("yes", "no"),
        },
        weight=2.0,
    ),
    "elementwise": Kind(
        elementwise,
        {
            "how": ("scale", "clamp", "where", "softmax", "norm", "detach", "cast",
                    "abs", "function", "gain", "channel sort", "channel topk",
                    "channel cumsum", "vmap"),
        },
        weight=2.0,
    ),
    "dropout": Kind(dropout, {"how": ("function", "module", "noise")}, weight=0.3),
    "experts": Kind(experts, {"how": ("dense", "looped")}, weight=0.4),
}  # fmt: skip
