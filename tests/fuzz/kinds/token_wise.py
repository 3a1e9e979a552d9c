"""What treats every token alike: norms, MLPs, activations, dropout, mixtures."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

ACTIVATION = ("F.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid",
              "F.softplus")  # fmt: skip

CUBED = """
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


NORMS = {
    "nn.LayerNorm": "{layer}({x})",
    "nn.RMSNorm": "{layer}({x})",
    "rms by hand": "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5)"
    " * {gain}",
    "layer by hand": "({x} - {mean}) / ({x}.var(-1, False, keepdim=True) + 1e-5)"
    ".sqrt()",
    "F.layer_norm": "F.layer_norm({x}, {x}.shape[-1:])",
    "nn.BatchNorm1d": "{layer}({x}.transpose(1, 2)).transpose(1, 2)",
    "nn.GroupNorm": "{layer}({x}.transpose(1, 2)).transpose(1, 2)",
    "nn.InstanceNorm1d": "{layer}({x}.transpose(1, 2)).transpose(1, 2)",
}


def norm(s: Site) -> None:
    """Norms over the width, and over tokens and batch."""
    how, x, words = s["how"], s.a, {}
    if how.startswith("nn."):
        groups = "2, " if how == "nn.GroupNorm" else ""
        words["layer"] = s.module(f"{how}({groups}{s.width})")
    elif how == "rms by hand":
        words["gain"] = s.parameter(s.width)
    elif how == "layer by hand":
        words["mean"] = s.let(f"{x}.mean(-1, keepdim=True)")
    s.returns(NORMS[how].format(x=x, **words))


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


ELEMENTWISE = {
    "scale": "{x} * 0.5 + 1.0",
    "clamp": "{x}.clamp(-2.0, 2.0)",
    "where": "torch.where({x} > 0, {x}, {x} * 0.1)",
    "softmax": "torch.softmax({x}, -1)",
    "norm": "{x} / ({x}.norm(dim=-1, keepdim=True) + 0.1)",
    "detach": "{x} - 0.5 * {x}.detach()",
    "cast": "{x} + {x}.double().sin().to({x}.dtype)",
    "abs": "{x}.abs().sqrt().clamp(min=0.3)",
    "function": "Cubed.apply({x})",
    "gain": "{x} * {gain}",
    "channel sort": "{x}.sort(-1, descending=True)[0]",
    "channel topk": "{x} + {x}.topk(2, dim=-1)[0].sum(-1, keepdim=True)",
    "channel cumsum": "{x}.cumsum(-1) / 4",
    "vmap": "torch.func.vmap(lambda u: u * 2 + 1)({x})",
}


def elementwise(s: Site) -> None:
    """Arithmetic on one value."""
    if s["how"] == "function":
        s.helper(CUBED)
    gain = s.parameter(s.width) if s["how"] == "gain" else ""
    s.returns(ELEMENTWISE[s["how"]].format(x=s.a, gain=gain))


DROPPED = {
    "function": "F.dropout({x}, 0.25, self.training)",
    "module": "{layer}({x})",
    "noise": "{x} + 0.1 * torch.randn_like({x})",
}


def dropout(s: Site) -> None:
    """Random numbers, seeded alike in every run."""
    s.sheet.drawn = True
    layer = s.module("nn.Dropout(0.25)") if s["how"] == "module" else ""
    s.returns(DROPPED[s["how"]].format(x=s.a, layer=layer))


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


CHANGING = {
    "times": "{x} * {rate}",
    "divided": "{x} / {rate}",
    "mixed": "{x} * (1 - {rate}) + {x}.tanh() * {rate}",
    "added": "{x} + {rate} * {x}.square().mean()",
    "compared": "torch.where({x} > {rate}, {x}, {x} * 0.5)",
    "power": "{x}.abs().clamp(min=0.1) ** {rate}",
    "clamp": "{x}.clamp(-{rate}, {rate})",
    "lerp": "torch.lerp({x}, {x}.tanh(), {rate})",
    "alpha": "torch.add({x}, {x}.sin(), alpha={rate})",
    "scale": "F.scaled_dot_product_attention({x}, {x}, {x}, scale={rate})",
    "dropout": "F.dropout({x}, {rate}, self.training)",
}


def changing(s: Site) -> None:
    """A float of the model that is another one in every call: its caller sets it."""
    s.sheet.drawn |= s["how"] == "dropout"
    s.returns(CHANGING[s["how"]].format(x=s.a, rate="self.rate"))


KINDS = {
    "changing": Kind(changing, {"how": tuple(CHANGING)}, weight=0.5),
    "norm": Kind(norm, {"how": tuple(NORMS)}, weight=2.0),
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
    "elementwise": Kind(elementwise, {"how": tuple(ELEMENTWISE)}, weight=2.0),
    "dropout": Kind(dropout, {"how": tuple(DROPPED)}, weight=0.3),
    "experts": Kind(experts, {"how": ("dense", "looped")}, weight=0.4),
}  # fmt: skip
