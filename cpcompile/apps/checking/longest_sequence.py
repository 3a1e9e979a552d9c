"""Estimate how long a sequence fits, and say what the estimate is based on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from cpcompile.apps.checking.fake_step import CheckedCall
from cpcompile.cost.max_sequence.fit import fit
from cpcompile.cost.max_sequence.model_memory import Decoder
from cpcompile.cost.planner import BYTES_PER_ELEMENT
from cpcompile.reporting.graph_report import GraphReport, account_of

_ALIKE = 0.02  # of the parameters, by which sizes may miss those of the model
_ADAM = {2: 12, 4: 8}  # bytes of its state per parameter, with a copy in float32
_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
}


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that one training step has room for.

    tokens: of the sequence, on all ranks together; 0 if none fits.
    memory: bytes of one rank. basis: what the estimate is based on, in words.
    """

    tokens: int
    memory: float
    basis: str

    def __str__(self) -> str:
        room = f"{self.memory / 1e9:.4g} GB per rank"
        if not self.tokens:
            return f"no sequence in {room}: {self.basis}"
        return f"about {self.tokens:,} tokens in {room}: {self.basis}"


def longest_sequence(
    call: CheckedCall, graphs: Sequence[GraphReport], hardware: str
) -> LongestSequence | None:
    """Return the estimate; None where there is no honest one.

    A decoder whose parameters `cp.fit` counts right is fitted by it. Of other models
    what the forward saves is taken to grow with the tokens. It grows faster where
    attention by hand saves weights of all pairs, and there is no estimate; and slower
    where a longer loss runs in tiles.
    """
    memory = call.memory
    if memory is None and call.device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(call.device).total_memory)
    if memory is None or not call.backward:
        return None
    decoder, dtype = _decoder(call.model), _dtype(call.model)
    if decoder is not None and dtype is not None:
        found = fit(
            decoder,
            memory=memory,
            ranks=call.ranks,
            dtype=dtype,
            hardware=call.hardware or hardware,
        )
        basis = "by cp.fit for a decoder of this size, with Adam, one row"
        return LongestSequence(found.tokens, memory, basis)
    saved = saved_per_token(graphs)
    if saved is None:
        return None
    size, rows = saved
    fixed = 0
    for parameter in call.model.parameters():
        itemsize = parameter.element_size()
        needed = _ADAM.get(itemsize, 2 * itemsize) + itemsize
        fixed += parameter.numel() * (itemsize + needed * parameter.requires_grad)
    tokens = int(max(memory - fixed, 0.0) / (size * rows)) * call.ranks
    basis = (
        f"{fixed / 1e9:.3g} GB of parameters, gradients and Adam, and for a token the "
        f"{size / 1024:.1f} KiB that the forward saves at this length, without what "
        f"the backward needs beside; {rows} {'rows' if rows > 1 else 'row'}. A longer "
        "loss runs in tiles and saves less: check an input of that length"
    )
    return LongestSequence(tokens, memory, basis)


def saved_per_token(graphs: Sequence[GraphReport]) -> tuple[float, int] | None:
    """Return bytes that a rank saves per token of its own, and the rows of the batch.

    None without a sharded input, or where attention by hand may save all pairs, or
    where sequences have several lengths.
    """
    if any(graph.by_hand or graph.began for graph in graphs):
        return None
    inputs = [x for graph in graphs for x in graph.inputs]
    saved = account_of(graphs).saved_bytes
    if not saved or len({x.sizes[x.dim] for x in inputs}) != 1:
        return None
    sizes, dim = inputs[0].sizes, inputs[0].dim
    rows = sizes[0] if dim == 1 else 1
    return saved / (rows * -(-sizes[dim] // graphs[0].ranks)), rows


def _dtype(model: nn.Module) -> str | None:
    """Return the dtype of all parameters, or None for several."""
    dtypes = {str(x.dtype).removeprefix("torch.") for x in model.parameters()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*BYTES_PER_ELEMENT} else None


def _decoder(model: nn.Module) -> Decoder | None:
    """Return the sizes of a decoder of transformers, if they count its parameters."""
    config = getattr(model, "config", None)
    numbers: dict[str, Any] = {x: getattr(config, y, None) for x, y in _NAMES.items()}
    if not all(type(x) is int and x > 0 for x in numbers.values()):
        return None
    head_dim = getattr(config, "head_dim", None)
    decoder = Decoder(
        head_dim=head_dim or numbers["hidden"] // numbers["heads"],
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        **numbers,
    )
    count = sum(x.numel() for x in model.parameters())
    return decoder if abs(decoder.parameters - count) <= _ALIKE * count else None
