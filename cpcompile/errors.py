"""The errors cpcompile raises; `BackendCompilerFailed` prints their class names.

Dynamo re-raises what a backend raises as `BackendCompilerFailed: backend='cp'
raised: <class name>: <message>`, so a class name reads as the subject of a sentence.
"""

from __future__ import annotations


class OptionRejected(ValueError):
    """An option of `torch.compile(..., backend="cp", options=...)` is wrong."""


class InputRejected(ValueError):
    """An input, mesh or dimension that the user named cannot be used."""


class RanksDisagree(RuntimeError):
    """The ranks of one group compile different programs; every rank raises this."""


class CannotRewrite(RuntimeError):
    """A part of the graph cannot be made context parallel and stay equal.

    Strict mode raises it. Otherwise it becomes one warning, and the part it names
    runs on gathered tensors: correct, only slower.
    """


class DropoutUnsupported(CannotRewrite):
    """Attention dropout on a sharded sequence; strict mode raises it.

    It is never ignored: otherwise the call runs on gathered tensors, with the mask
    that one device draws.
    """


class RingNotOverlapped(RuntimeError):
    """A message of a ring is waited for before a step has hidden it."""
