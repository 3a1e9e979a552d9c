"""The errors that cpcompile raises; `BackendCompilerFailed` prints their class names.

Dynamo re-raises what a backend raises as `BackendCompilerFailed: backend='cp'
raised: <class name>: <message>`, so a class name reads as the subject of a sentence.
"""

from __future__ import annotations


class OptionRejected(ValueError):
    """An option of `torch.compile(..., backend="cp", options=...)` is wrong.

    Also raised for a wrong setting of `cpcompile.config`.
    """


class InputRejected(ValueError):
    """An input, mesh or dimension that the user named cannot be used."""


class RanksDisagree(RuntimeError):
    """The ranks of one group compile different programs; every rank raises this.

    Also raised, by the ranks that wait, where some ranks do not come or have ended.
    """


class RankFailed(RanksDisagree):
    """Another rank could not compile what this one can, so that no rank uses it.

    final: whether no other way of compilation fixes that.
    """

    def __init__(self, message: str, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


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


class BufferChanged(RuntimeError):
    """A buffer that was read as a mask has another value, and nothing compiles again.

    To run the program would be to mask by the old value.
    """


class UnforeseenCall(CannotRewrite):
    """A call that DTensor cannot do, though trials took it for one that it can do.

    call: its name in the graph; reason: what fails, for the warning.
    """

    def __init__(self, what: str, call: str, reason: str) -> None:
        super().__init__(f"{what} cannot run on sharded tensors; {reason}")
        self.call, self.reason = call, reason


class RingNotOverlapped(RuntimeError):
    """A message of a ring is waited for before a step has hidden it."""
