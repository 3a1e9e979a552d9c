"""The errors that cpcompile raises; `BackendCompilerFailed` prints their class names.

Dynamo re-raises what a backend raises as `BackendCompilerFailed: backend='cp'
raised: <class name>: <message>`, so a class name reads as the subject of a sentence.
"""

from __future__ import annotations


class CPError(Exception):
    """An error of cpcompile; every class below is one."""


class OptionError(CPError, ValueError):
    """An option of `torch.compile(..., backend="cp", options=...)` is wrong.

    Also raised for a wrong setting of `cpcompile.config`.
    """


class InputError(CPError, ValueError):
    """An input, mesh or dimension that the user named cannot be used."""


class RankMismatchError(CPError, RuntimeError):
    """The ranks of one group compile different programs; every rank raises this.

    Also raised, by the ranks that wait, where some ranks do not come or have ended.
    """


class RankFailedError(RankMismatchError):
    """Another rank could not compile what this one can, so that no rank uses it.

    final: whether no other way of compilation fixes that.
    """

    def __init__(self, message: str, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class RewriteError(CPError, RuntimeError):
    """A part of the graph cannot be made context parallel and stay equal.

    Strict mode raises it. Otherwise it becomes one warning, and the part it names
    runs on gathered tensors: correct, only slower.
    """


class DropoutError(RewriteError):
    """Attention dropout on a sharded sequence; strict mode raises it.

    It is never ignored: otherwise the call runs on gathered tensors, with the mask
    that one device draws.
    """


class BufferChangedError(CPError, RuntimeError):
    """A buffer that was read as a mask has another value, and nothing compiles again.

    To run the program would be to mask by the old value.
    """


class RecompileLimitError(CPError, RuntimeError):
    """A function has as many programs as torch.compile allows, and needs another one.

    Strict mode raises it on each such call. Otherwise torch runs the function as it is,
    unsharded, after one warning.
    """


class RingOverlapError(CPError, RuntimeError):
    """A message of a ring is waited for before a step has hidden it."""
