"""What looks across the tokens: convolutions, scans, sorts, reductions, two values."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site

# More arguments of the layer, what is done to its operand, and to its result.
CONVOLUTIONS = {
    "same": (", padding={half}", "{x}.transpose(1, 2)", ""),
    "mT": (", padding={half}", "{x}.mT", ""),
    "depthwise": (", padding={half}", "{x}.transpose(1, 2)", ""),
    "causal": ("", "F.pad({x}.transpose(1, 2), ({before}, 0))", ""),
    "cut": (", padding={before}", "{x}.transpose(1, 2)", "[..., : {x}.shape[1]]"),
    "dilated": (", padding={before}, dilation=2", "{x}.transpose(1, 2)", ""),
    "circular": (
        *(", padding={half}, padding_mode='circular'", "{x}.transpose(1, 2)", ""),
    ),
}


def convolution(s: Site) -> None:
    """A convolution over the sequence, of the same length."""
    width, how, x = s.width, s["how"], s.a
    size = 3 + 2 * s.number(0, 2)
    words = {"x": x, "half": size // 2, "before": size - 1}
    more, given, cut = (text.format(**words) for text in CONVOLUTIONS[how])
    groups = width if how == "depthwise" else 1
    layer = s.module(f"nn.Conv1d({width}, {width}, {size}, groups={groups}{more})")
    y = f"{layer}({given}){cut}" + (".mT" if how == "mT" else ".transpose(1, 2)")
    s.returns(f"{x} + {y}" if s["residual"] == "yes" else y)


ALONG = {
    "roll": "{x}.roll({shift}, 1)",
    "flip": "{x}.flip(1)",
    "cumsum": "{x}.cumsum(1) / {x}.shape[1]",
    "cummax": "{x}.cummax(1)[0]",
    "logcumsumexp": "{x}.logcumsumexp(1)",
    "softmax": "{x}.softmax(1) * {x}.shape[1]",
    "sort": "{x}.sort(1)[0]",
    "argsort": "{x}.gather(1, {x}.detach().argsort(dim=1, stable=True))",
    "index": "{x}[:, torch.arange({length} - 1, -1, -1)]",
    "gather": "{x}.gather(1, torch.arange({length})[None, :, None].expand_as({x})"
    ".flip(1))",
    "index_select": "{x}.index_select(1, torch.arange({x}.shape[1]).roll({shift}))",
    "difference": "{x}.diff(dim=1, prepend={x}[:, :1])",
    "split and cat": "torch.cat([{x}[:, {shift}:], {x}[:, :{shift}]], 1)",
    "even and odd": "torch.cat([{x}[:, ::2], {x}[:, 1::2]], 1)",
    "pool": "F.avg_pool1d({x}.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "tril": "torch.ones({x}.shape[1], {x}.shape[1], dtype={x}.dtype).tril() @ {x} / 8",
    "repeat": "{x}.repeat(1, 2, 1)[:, : {x}.shape[1]]",
    "interleave": "{x}.repeat_interleave(2, 1)[:, ::2] * 0.5",
    "shift": "F.pad({x}, (0, 0, 1, 0))[:, :-1] + {x}",
    "select write": "torch.index_fill({x}, 1, torch.tensor([0]), 0.5)",
}


def along(s: Site) -> None:
    """Scans, shifts and sorts along the sequence."""
    shift, how = 1 + s.number(0, 3), s["how"]
    if how in ("gather", "index") and len(set(s.lengths)) > 1:
        how = "flip"  # an index is of one length
    s.returns(ALONG[how].format(x=s.a, shift=shift, length=s.lengths[0]))


def reduction(s: Site) -> None:
    """A reduction over or beside the sequence, given back to all tokens."""
    x, dims = s.a, {"tokens": "1", "batch": "0", "width": "2", "both": "(0, 1)"}
    dim = dims[s["over"]]
    if s["how"] in ("amax", "amin", "mean", "sum", "std", "var", "norm", "logsumexp"):
        more = ", correction=0" if s["how"] in ("std", "var") else ""
        y = f"{x}.{s['how']}(dim={dim}, keepdim=True{more})"
        y = f"({y} + 1e-3)" if s["how"] == "std" else y
        y = f"{y} / 8" if s["how"] == "sum" else y
    elif s["over"] == "both":
        y = f"{x}.mean((0, 1)).sin()"
    elif s["how"] == "max values":
        y = f"{x}.max({dim}, keepdim=True)[0]"
    elif s["how"] == "median":
        y = f"{x}.median({dim}, keepdim=True).values"
    else:
        y = f"{x}.topk(1, dim={dim})[0]"
    y = s.let(y)
    texts = {
        "minus": f"{x} - {y}",
        "times": f"{x} * torch.sigmoid({y})",
        "divided": f"{x} / (1.0 + {y}.abs())",
        "expanded": f"{x} + {y}.expand({x}.shape)",
    }
    s.returns(texts[s["given back"]])


def gate(s: Site) -> None:
    """Squeeze and excite: a mean over tokens through a layer."""
    pooled = s.let(f"{s.a}.mean(1)" if s["how"] == "mean" else f"{s.a}.amax(1)")
    if s["layer"] == "linear":
        given = f"{s.linear(s.width, s.width)}({pooled})"
    else:
        layer = s.module(f"nn.Conv1d({s.width}, {s.width}, 1)")
        given = f"{layer}({pooled}[..., None])[..., 0]"
    weight = s.let(f"torch.sigmoid({given})")
    s.returns(f"{s.a} * {weight}[:, None]" if s["back"] == "index" else
              f"{s.a} * {weight}.unsqueeze(1)")  # fmt: skip


WHOLE = "(2 * {x}).round() / 2"  # with equal entries
RARE = {
    "equal": f"{{x}} + ({WHOLE}).amax()",
    "equal of tokens": f"{{x}} - ({WHOLE}).amax(1, keepdim=True)",
    "infinity norm": f"{{x}} / (1 + torch.linalg.vector_norm({WHOLE}, float('inf')))",
    "no dimensions": "{x} * {x}.square().mean(())",
    "last": "{x} * {x}.sum(-1)[:, -1].tanh()[:, None, None]",
    "by a number": "{x} * {x}[0, :, 0].gather(0, torch.tensor(1)).tanh()",
    "small": "{x} + ({x}.detach() * 64).to(torch.int16).amax(1, True) / 64",
    "sent small": "{x} + ({x}.detach() * 64).to(torch.int16).flip(1) / 64",
    "copysign": "torch.copysign({x}, {x}.flip(1))",
    "sgn": "{x} * torch.sgn({x})",
    "conj": "{x} + torch.fft.rfft({x}, dim=1).conj().imag.mean(1, True)",
    "by frequency": "{x} + F.embedding(({x}.detach()[..., 0] * 8).long().abs() % 7, "
    "{table}, scale_grad_by_freq=True)",
    "scattered": "{x}.masked_scatter(torch.ones(1) > 0, {x} * 2)",
}


def rare(s: Site) -> None:
    """Calls whose numbers depend on counts, on signs and bits, or on one token."""
    table = s.parameter(7, s.width) if s["how"] == "by frequency" else ""
    s.returns(RARE[s["how"]].format(x=s.a, table=table))


COMBINE = {
    "add": "{x} + {y}",
    "times": "{x} * torch.tanh({y})",
    "lerp": "torch.lerp({x}, {y}, 0.3)",
    "stack": "torch.stack([{x}, {y}]).sum(0)",
    "maximum": "torch.maximum({x}, {y})",
    "chunks": "torch.cat([{x}.chunk(2, -1)[0], {y}.chunk(2, -1)[1]], -1)",
    "where": "torch.where({x} > {y}, {x}, {y} * 0.5)",
    "tokens": "torch.cat([{x}, {y}], 1)[:, ::2]",
    "batches": "torch.cat([{x}, {y}], 0)[: {x}.shape[0]] * 1.5",
    "pairs": "({x} @ {y}.transpose(1, 2)).softmax(-1) @ {x}",
    "cat": "{layer}(torch.cat([{x}, {y}], -1))",
}


def combine(s: Site) -> None:
    """Two values of one length."""
    layer = s.linear(2 * s.width, s.width) if s["how"] == "cat" else ""
    s.returns(COMBINE[s["how"]].format(x=s.a, y=s.b, layer=layer))


KINDS = {
    "convolution": Kind(
        convolution,
        {"how": tuple(CONVOLUTIONS), "residual": ("yes", "no")},
        weight=2.0,
    ),
    "along": Kind(along, {"how": tuple(ALONG)}, weight=2.0),
    "reduction": Kind(
        reduction,
        {
            "how": ("mean", "sum", "amax", "amin", "std", "var", "norm", "logsumexp",
                    "max values", "median", "topk"),
            "over": ("tokens", "batch", "width", "both"),
            "given back": ("minus", "times", "divided", "expanded"),
        },
        weight=2.0,
    ),
    "rare": Kind(rare, {"how": tuple(RARE)}, weight=1.5),
    "gate": Kind(
        gate,
        {
            "how": ("mean", "amax"),
            "layer": ("linear", "convolution"),
            "back": ("index", "unsqueeze"),
        },
        weight=0.7,
    ),
    "combine": Kind(combine, {"how": tuple(COMBINE)}, operands=2, weight=2.5),
}  # fmt: skip
