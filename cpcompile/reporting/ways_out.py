"""Texts that reports and warnings share: places, and what can be done about them."""

from __future__ import annotations

import os
import pathlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpcompile import errors
from cpcompile.accounting.graph_account import Exchange, LineWork
from cpcompile.torch_patches.graph_breaks import GraphBreak, SourceLine, reason_text

MEBIBYTE = 2**20
NAME_IT = 'options={"shard": {"argument": dim}}'
CALL_IT = (
    "call F.scaled_dot_product_attention (nn.MultiheadAttention does with "
    "need_weights=False)"
)
REORDERED = (
    "what reorders tokens by data, or loops over parts of them, gathers all of them: "
    "mask tokens instead (labels of -100, weights of zero), reorder hidden states and "
    "not logits, call on all tokens at once"
)
_LIBRARIES = tuple(
    str(pathlib.Path(path)) + os.sep
    for path in (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        pathlib.Path(str(torch.__file__)).parent,
        pathlib.Path(errors.__file__).parent,
    )
)

# A part of torch's text, and what fixes such a break.
_WAYS_OUT = (
    (
        "capture_scalar_outputs",
        "set torch._dynamo.config.capture_scalar_outputs = True, which keeps numbers "
        "of a tensor in the graph",
    ),
    (
        "capture_dynamic_output_shape_ops",
        "set torch._dynamo.config.capture_dynamic_output_shape_ops = True (and "
        "capture_scalar_outputs), which keeps sizes that depend on data in the graph",
    ),
    (
        "requires_grad_",
        "call requires_grad_ outside of what is compiled; enable_input_require_grads "
        "of transformers and PEFT is for reentrant checkpoints alone, and "
        'gradient_checkpointing_kwargs={"use_reentrant": False} needs no such hook',
    ),
    (
        "allow_rnn",
        "set torch._dynamo.config.allow_rnn = True, which keeps it in the graph",
    ),
    (
        "Data dependent operator",
        "decide outside of what is compiled what depends on the values of a tensor",
    ),
)
NESTED = (
    "set torch._dynamo.config.nested_graph_breaks = True, which keeps what follows a "
    "break in one graph with what follows in its callers"
)
REMOVE_IT = "remove the break to keep everything sharded"


def place_of(row: Exchange | LineWork) -> str:
    """Say where a row of an account belongs: "train.py:3, in forward (layers.0)"."""
    return str(row.line) if row.what == "<top level>" else f"{row.line} ({row.what})"


@dataclass(frozen=True)
class GraphBreakPlace:
    """A place where a graph of Dynamo ends. fix: the way out, if one is known."""

    place: str
    reason: str
    fix: str

    @classmethod
    def of(cls, noted: GraphBreak) -> GraphBreakPlace:
        """Say what is known of a break.

        Its places lead from the frame that is compiled to the line that breaks. Where
        that is in a function that the frame has called, what follows in the frame
        becomes a graph of its own, without attention, but for a setting of torch.
        """
        fix = next((fix for part, fix in _WAYS_OUT if part in noted.text), REMOVE_IT)
        nested = getattr(torch._dynamo.config, "nested_graph_breaks", True)
        if len(noted.places) > 1 and not nested:
            fix += f", or {NESTED}"
        return cls(_place(noted.places), reason_text(noted.text), fix)

    def __str__(self) -> str:
        return f"{self.place} ({self.reason})"


def _place(places: Sequence[SourceLine]) -> str:
    """Return the line that breaks; for a library, also the user's line that called."""
    if not places:
        return "unknown line"
    text = "{}:{}".format(*places[-1])
    callers = [x for x in places if not x[0].startswith(_LIBRARIES)]
    if callers and callers[-1] != places[-1]:
        text += ", called at {}:{}".format(*callers[-1])
    return text
