"""Texts about a graph break: the line, who called it, why, and the way out."""

from __future__ import annotations

import os
import pathlib
import sysconfig
from collections.abc import Sequence

import torch

from cpcompile import errors
from cpcompile.torch_patches.graph_breaks import SourceLine

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


def place_text(places: Sequence[SourceLine]) -> str:
    """Return the line that breaks; for a library, also the user's line that called."""
    if not places:
        return "unknown line"
    text = "{}:{}".format(*places[-1])
    callers = [x for x in places if not x[0].startswith(_LIBRARIES)]
    if callers and callers[-1] != places[-1]:
        text += ", called at {}:{}".format(*callers[-1])
    return text


def way_out(text: str, places: Sequence[SourceLine] = ()) -> str:
    """Return what the user can do about a break that torch explains with `text`.

    places: from the frame that is compiled to the line that breaks. Where that is in a
    function that the frame has called, what follows in the frame becomes a graph of its
    own, without attention, but for a setting of torch.
    """
    fix = next((fix for part, fix in _WAYS_OUT if part in text), REMOVE_IT)
    nested = getattr(torch._dynamo.config, "nested_graph_breaks", True)
    if len(places) > 1 and not nested:
        fix += f", or {NESTED}"
    return fix
