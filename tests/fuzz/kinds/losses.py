"""Where sequences come from, and the losses at the end."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

VOCABULARY = 20


def source(s: Site) -> None:
    """A sequence [batch, tokens, width] of an argument."""
    how, name = s["how"], s.statement.name
    width, n = s.width, s.setting.batch
    if how in ("tokens", "tokens and places", "tokens and waves", "given places"):
        tokens = s.input(
            f"tokens{name}", f"torch.randint(0, {VOCABULARY}, (batch, length))", 1
        )
        x = f"{s.module(f'nn.Embedding({VOCABULARY}, {width})')}({tokens})"
        if how == "tokens and places":
            most = max(s.lengths)
            x += f" + {s.parameter(most, width)}[: {tokens}.shape[1]]"
        elif how == "tokens and waves":
            places = f"torch.arange({tokens}.shape[1], dtype=torch.{s.setting.dtype})"
            x += f" + {places}[:, None].mul(0.1).sin()"
        elif how == "given places":
            places = s.input("places", "torch.arange(length).expand(batch, -1)", 1)
            x += f" + {s.module(f'nn.Embedding({max(s.lengths)}, {width})')}({places})"
        s.returns(x)
    elif how == "sequence first":
        x = s.input(f"x{name}", f"torch.randn(length, batch, {width})", 0)
        s.returns(f"{s.linear(width, width)}({x}).transpose(0, 1)")
    elif how == "channels first":
        x = s.input(f"x{name}", f"torch.randn(batch, {width}, length)", 2)
        s.returns(f"{x}.transpose(1, 2)")
    elif how == "image":
        made = "torch.randn(batch, 3, 2 * length, 2)"
        layer = s.module(f"nn.Conv2d(3, {width}, 2, 2)")
        x = s.input(f"image{name}", made, None)
        s.returns(f"{layer}({x}).flatten(2).transpose(1, 2)")
    elif how == "expanded":
        x = s.input(
            f"x{name}", f"torch.randn(1, length, {width}).expand({n}, -1, -1)", 1
        )
        s.returns(f"{s.linear(width, width)}({x})")
    else:
        grad = ".requires_grad_()" if how == "float with gradient" else ""
        x = s.input(f"x{name}", f"torch.randn(batch, length, {width}){grad}", 1)
        s.returns(
            f"{s.linear(width, width)}({x})" if how == "float linear" else f"{x} * 1.0"
        )


def loss(s: Site) -> None:
    """A number."""
    how, x, width = s["how"], s.a, s.width
    same = s.lengths == s.setting.lengths
    if how.startswith("labels") and same:
        head = s.linear(width, VOCABULARY)
        labels = s.input(
            "labels", f"torch.randint(0, {VOCABULARY}, (batch, length))", 1
        )
        if "ignored" in how:
            labels = s.let(f"{labels}.masked_fill({labels} < 6, -100)")
        logits = s.let(f"{head}({x})")
        if "shifted" in how:
            logits, labels = f"{logits}[:, :-1]", f"{labels}[:, 1:]"
        smooth = ", label_smoothing=0.1" if "smoothed" in how else ""
        if "turned" in how:
            s.returns(f"F.cross_entropy({logits}.transpose(1, 2), {labels}{smooth})")
        elif "summed" in how:
            flat = f"{logits}.reshape(-1, {VOCABULARY}), {labels}.reshape(-1)"
            s.returns(f'F.cross_entropy({flat}, reduction="sum") / 10')
        else:
            flat = f"{logits}.flatten(0, 1), {labels}.flatten()"
            s.returns(f"F.cross_entropy({flat}{smooth})")
        return
    if how == "target" and same:
        target = s.input("target", f"torch.randn(batch, length, {width})", 1)
        s.returns(f"F.mse_loss({x}, {target})")
        return
    if how == "masked mean" and same:
        weight = s.let(f"{s.padding()}[..., None].to({x}.dtype)")
        s.returns(f"({x}.square() * {weight}).sum() / {weight}.sum()")
        return
    if how == "pooled":
        s.returns(f"{s.linear(width, 5)}({x}.mean(1)).logsumexp(-1).mean()")
        return
    rising = f"torch.linspace(-1, 1, {width}, dtype={x}.dtype)"
    texts = {
        "sum": f"{x}.sum() / 100",
        "last token": f"{x}[:, -1].square().mean()",
        "first token": f"{x}[:, 0].sin().sum()",
        "some token": f"{x}[:, {x}.shape[1] // 2].square().sum()",
        "weighted": f"({x} * {rising}).sin().mean()",
        "places": f"({x} * torch.arange({x}.shape[1])[:, None]).tanh().mean()",
        # apart, because of equal values the gradient is the sign of a rounding
        "absolute": f"F.l1_loss({x}, {x}.detach().roll(1, 1) + 0.37)",
        "spread": f"{x}.std() + {x}.var(1).mean()",
        "largest": f"{x}.amax(1).mean() + {x}.logsumexp((0, 1)).mean()",
        "norm": f"{x}.norm() / 10",
        "entropy": f"-({x}.softmax(-1) * {x}.log_softmax(-1)).sum(-1).mean()",
    }
    s.returns(texts.get(how, f"{x}.square().mean()"))


SOURCES = {
    "source": Kind(
        source,
        {
            "how": ("float", "float with gradient", "float linear", "tokens",
                    "tokens and places", "tokens and waves", "given places",
                    "sequence first", "channels first", "image", "expanded"),
        },
        operands=0,
    ),
}  # fmt: skip

LOSSES = {
    "loss": Kind(
        loss,
        {
            "how": ("square", "sum", "labels", "labels ignored", "labels shifted",
                    "labels turned", "labels smoothed ignored", "labels summed",
                    "target", "masked mean", "pooled", "last token", "first token",
                    "some token",
                    "weighted", "places", "absolute", "spread", "largest", "norm",
                    "entropy"),
        },
    ),
}  # fmt: skip
