"""The forms of attention that torch's Inductor knows, as attention over a sequence.

torch._inductor.fx_passes.fuse_attention has a function for each: `_sfdp_pattern_1`, ...
They are called here as a model would call them. Seen in torch 2.13.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention

NUMBERS = {"inv_scale": 2.0, "inv_scale_factor": 2.0, "scale_factor": 0.5}


@dataclass(frozen=True)
class TorchForm:
    """One of torch's functions.

    tokens_first: it takes [B, S, H, D], otherwise [B, H, S, D]; or [H, S, D] if `flat`.
    mask: its kind, see `masks`. contiguous: it views its queries. dtype: of the models
    that it is for, because it converts to it; number `like`, with `inv_scale`, computes
    the same in any dtype.
    """

    tokens_first: bool = False
    mask: str | None = None
    flat: bool = False
    contiguous: bool = False
    dtype: torch.dtype | None = None
    like: int = 0
    inv_scale: float = 1.0


_FIRST = TorchForm(tokens_first=True)
TABLE: dict[int, TorchForm] = {
    **dict.fromkeys((1, 2, 3, 4, 28), TorchForm()),
    **dict.fromkeys((5, 6), TorchForm(mask="pairs")),
    **dict.fromkeys(
        (7, 8, 9, 10), replace(_FIRST, dtype=torch.float16, like=11, inv_scale=2.0)
    ),
    **dict.fromkeys((11, 12, 30), _FIRST),
    **dict.fromkeys((23, 27), replace(_FIRST, dtype=torch.float32, like=11)),
    13: TorchForm(flat=True),
    **dict.fromkeys((14, 16), TorchForm(True, "keys")),
    **dict.fromkeys(
        (21, 22, 25, 26), TorchForm(True, "keys", dtype=torch.float32, like=14)
    ),
    **dict.fromkeys((15, 17, 20), TorchForm(True, "visible keys")),
    18: TorchForm(True, "visible pairs"),
    19: TorchForm(False, "visible pairs"),
    24: TorchForm(mask="pairs", contiguous=True),
    29: TorchForm(True, "pairs"),
}


_PREFIX = "_sfdp_pattern_"


def numbers_of_torch() -> set[int]:
    """The functions that the installed torch has."""
    names = [x for x in vars(fuse_attention) if x.startswith(_PREFIX)]
    numbers = [x.removeprefix(_PREFIX) for x in names]
    return {int(x) for x in numbers if x.isdigit()}  # torch 2.14 has checks beside them


def _as_of_a_model() -> dict[str, Any]:
    """torch's functions with this file as theirs: Dynamo traces none of torch's."""
    namespace: dict[str, Any] = {"torch": torch, "__builtins__": builtins}
    for name, function in vars(fuse_attention).items():
        if name.startswith(_PREFIX):
            code = function.__code__.replace(co_filename=__file__)
            namespace[name] = FunctionType(code, namespace, name)
    return namespace


_FUNCTIONS = _as_of_a_model()


def pattern(number: int) -> Callable[..., Any]:
    """torch's function."""
    found: Callable[..., Any] = _FUNCTIONS[f"{_PREFIX}{number}"]
    return found


def masks(tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks of a batch of token ids; id 0 is padding."""
    at = torch.arange(tokens.shape[1])
    seen, kept = at <= at[:, None], tokens != 0
    low = torch.finfo(dtype).min

    def added(visible: Tensor) -> Tensor:
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, low)

    return {
        "pairs": added(seen)[None, None],
        "keys": added(kept[:, None, None]),
        "visible keys": kept.to(torch.int64),
        "visible pairs": seen[None, None],
    }


class TorchForm(torch.nn.Module):
    """One layer of attention in one of torch's forms; [B, S] -> [B, S, vocabulary]."""

    def __init__(self, number: int, dropout_p: float = 0.0, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.number, self.dropout_p, self.heads = number, dropout_p, heads
        self.numbers = NUMBERS
        self.embedding = torch.nn.Embedding(37, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        form, function = TABLE[self.number], pattern(self.number)
        x = self.embedding(tokens)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).chunk(3, -1))
        if not form.tokens_first:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if form.contiguous:
            q = q.contiguous()
        if form.flat:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        given: dict[str, Any] = {"dropout_p": self.dropout_p} | self.numbers
        known = masks(tokens, x.dtype)
        if self.number == 19:  # it has both
            given |= {"causal_mask": known["visible pairs"], "attn_mask": known["keys"]}
        elif form.mask is not None:
            names = ("attn_mask", "attention_mask", "causal_mask")
            given |= dict.fromkeys(names, known[form.mask])
        taken = list(inspect.signature(function).parameters)[3:]
        out = function(q, k, v, *(given[name] for name in taken))
        if isinstance(out, tuple):  # keys and values too, as for a cache
            out, *_ = out
        if form.flat:
            out = out.unflatten(0, (len(tokens), self.heads))
        logits: Tensor = self.head(x + out.transpose(1, 2).flatten(2))
        return logits
