"""What looks across the tokens: convolutions, scans, sorts, reductions, two values."""

from __future__ import annotations

from tests.fuzz.site import Kind, Site


def convolution(s: Site) -> None:
    """A convolution over the sequence, of the same length."""
    width, how, x = s.width, s["how"], s.a
    size = 3 + 2 * s.number(0, 2)
    groups = width if how == "depthwise" else 1
    words = f"{width}, {width}, {size}, groups={groups}"
    if how == "causal":
        layer = s.module(f"nn.Conv1d({words})")
        y = f"{layer}(F.pad({x}.transpose(1, 2), ({size - 1}, 0)))"
    elif how == "dilated":
        layer = s.module(f"nn.Conv1d({words}, padding={size - 1}, dilation=2)")
        y = f"{layer}({x}.transpose(1, 2))"
    elif how == "cut":
        layer = s.module(f"nn.Conv1d({words}, padding={size - 1})")
        y = f"{layer}({x}.transpose(1, 2))[..., : {x}.shape[1]]"
    elif how == "circular":
        layer = s.module(
            f"nn.Conv1d({words}, padding={size // 2}, padding_mode='circular')"
        )
        y = f"{layer}({x}.transpose(1, 2))"
    else:
        layer = s.module(f"nn.Conv1d({words}, padding={size // 2})")
        turned = f"{x}.mT" if how == "mT" else f"{x}.transpose(1, 2)"
        y = f"{layer}({turned})"
    y = f"{y}.mT" if how == "mT" else f"{y}.transpose(1, 2)"
    s.returns(f"{x} + {y}" if s["residual"] == "yes" else y)


def along(s: Site) -> None:
    """Scans, shifts and sorts along the sequence."""
    x, shift, how = s.a, 1 + s.number(0, 3), s["how"]
    if how in ("gather", "index") and len(set(s.lengths)) > 1:
        how = "flip"  # an index is of one length
    if how == "select write":
        s.returns(f"torch.index_fill({x}, 1, torch.tensor([0]), 0.5)")
        return
    if how == "shift":
        s.returns(f"F.pad({x}, (0, 0, 1, 0))[:, :-1] + {x}")
        return
    tokens = f"{x}.shape[1]"
    places = f"torch.arange({s.lengths[0]})[None, :, None].expand_as({x})"
    lower = f"torch.ones({tokens}, {tokens}, dtype={x}.dtype).tril()"
    texts = {
        "roll": f"{x}.roll({shift}, 1)",
        "flip": f"{x}.flip(1)",
        "cumsum": f"{x}.cumsum(1) / {x}.shape[1]",
        "cummax": f"{x}.cummax(1)[0]",
        "logcumsumexp": f"{x}.logcumsumexp(1)",
        "softmax": f"{x}.softmax(1) * {x}.shape[1]",
        "sort": f"{x}.sort(1)[0]",
        "argsort": f"{x}.gather(1, {x}.detach().argsort(dim=1, stable=True))",
        "index": f"{x}[:, torch.arange({s.lengths[0]} - 1, -1, -1)]",
        "gather": f"{x}.gather(1, {places}.flip(1))",
        "index_select": f"{x}.index_select(1, torch.arange({tokens}).roll({shift}))",
        "difference": f"{x}.diff(dim=1, prepend={x}[:, :1])",
        "split and cat": f"torch.cat([{x}[:, {shift}:], {x}[:, :{shift}]], 1)",
        "even and odd": f"torch.cat([{x}[:, ::2], {x}[:, 1::2]], 1)",
        "pool": f"F.avg_pool1d({x}.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
        "tril": f"{lower} @ {x} / 8",
        "repeat": f"{x}.repeat(1, 2, 1)[:, : {x}.shape[1]]",
        "interleave": f"{x}.repeat_interleave(2, 1)[:, ::2] * 0.5",
    }  # fmt: skip
    s.returns(texts[how])


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


def rare(s: Site) -> None:
    """Calls whose numbers depend on counts, on signs and bits, or on one token."""
    x, how = s.a, s["how"]
    whole, last = f"(2 * {x}).round() / 2", f"{x}.sum(-1)[:, -1]"  # with equal entries
    ids = f"({x}.detach()[..., 0] * 8).long().abs() % 7"
    table = s.parameter(7, s.width) if how == "by frequency" else ""
    texts = {
        "equal": f"{x} + ({whole}).amax()",
        "equal of tokens": f"{x} - ({whole}).amax(1, keepdim=True)",
        "infinity norm": f"{x} / (1 + torch.linalg.vector_norm({whole}, float('inf')))",
        "no dimensions": f"{x} * {x}.square().mean(())",
        "last": f"{x} * {last}.tanh()[:, None, None]",
        "by a number": f"{x} * {x}[0, :, 0].gather(0, torch.tensor(1)).tanh()",
        "small": f"{x} + ({x}.detach() * 64).to(torch.int16).amax(1, True) / 64",
        "sent small": f"{x} + ({x}.detach() * 64).to(torch.int16).flip(1) / 64",
        "copysign": f"torch.copysign({x}, {x}.flip(1))",
        "sgn": f"{x} * torch.sgn({x})",
        "conj": f"{x} + torch.fft.rfft({x}, dim=1).conj().imag.mean(1, True)",
        "by frequency": f"{x} + F.embedding({ids}, {table}, scale_grad_by_freq=True)",
        "scattered": f"{x}.masked_scatter(torch.ones(1) > 0, {x} * 2)",
    }
    s.returns(texts[how])


def combine(s: Site) -> None:
    """Two values of one length."""
    x, y, how = s.a, s.b, s["how"]
    texts = {
        "add": f"{x} + {y}",
        "times": f"{x} * torch.tanh({y})",
        "lerp": f"torch.lerp({x}, {y}, 0.3)",
        "stack": f"torch.stack([{x}, {y}]).sum(0)",
        "maximum": f"torch.maximum({x}, {y})",
        "chunks": f"torch.cat([{x}.chunk(2, -1)[0], {y}.chunk(2, -1)[1]], -1)",
        "where": f"torch.where({x} > {y}, {x}, {y} * 0.5)",
        "tokens": f"torch.cat([{x}, {y}], 1)[:, ::2]",
        "batches": f"torch.cat([{x}, {y}], 0)[: {x}.shape[0]] * 1.5",
        "pairs": f"({x} @ {y}.transpose(1, 2)).softmax(-1) @ {x}",
    }
    if how == "cat":
        layer = s.linear(2 * s.width, s.width)
        s.returns(f"{layer}(torch.cat([{x}, {y}], -1))")
    else:
        s.returns(texts[how])


KINDS = {
    "convolution": Kind(
        convolution,
        {
            "how": ("same", "mT", "depthwise", "causal", "cut", "dilated", "circular"),
            "residual": ("yes", "no"),
        },
        weight=2.0,
    ),
    "along": Kind(
        along,
        {
            "how": ("roll", "flip", "cumsum", "cummax", "logcumsumexp", "softmax",
                    "sort", "argsort", "index", "gather", "index_select", "difference",
                    "split and cat", "even and odd", "pool", "tril", "repeat",
                    "interleave", "shift", "select write"),
        },
        weight=2.0,
    ),
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
    "rare": Kind(
        rare,
        {
            "how": ("equal", "equal of tokens", "infinity norm", "no dimensions",
                    "last", "by a number", "small", "sent small", "copysign", "sgn",
                    "conj", "by frequency", "scattered"),
        },
        weight=1.5,
    ),
    "gate": Kind(
        gate,
        {
            "how": ("mean", "amax"),
            "layer": ("linear", "convolution"),
            "back": ("index", "unsqueeze"),
        },
        weight=0.7,
    ),
    "combine": Kind(
        combine,
        {
            "how": ("add", "times", "lerp", "stack", "maximum", "chunks", "where",
                    "tokens", "batches", "pairs", "cat"),
        },
        operands=2,
        weight=2.5,
    ),
}  # fmt: skip
