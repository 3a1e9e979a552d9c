"""Remember where graphs break, and why, for messages about the graphs that follow.

A backend is told the reason of a break with the graph before it. Where a function
breaks before its first call, as in a hook of its first module, there is no such graph,
and the backend gets only what follows the break. Seen in torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import get_stack_above_dynamo
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

SourceLine = tuple[str, int]

_WHAT = "Developer debug context: "  # in torch's text
_LONGEST_NAME = 60  # letters; longer ones are those of Dynamo's own objects


@dataclass(frozen=True)
class GraphBreak:
    """A break: torch's text, and the lines that lead to it, the innermost last."""

    text: str
    places: tuple[SourceLine, ...]


_breaks: dict[SourceLine, GraphBreak] = {}  # since the last `forget`, by their line


@functools.cache
def install() -> None:
    """Have Dynamo note each break of a graph."""
    original = getattr(InstructionTranslatorBase, "log_graph_break", None)
    if original is None:  # another torch: breaks are told with graphs alone
        return

    @functools.wraps(original)
    def log_graph_break(
        self: Any, code_options: Any, reason: str = "", exc: Any = None, **more: Any
    ) -> Any:
        inside = getattr(exc, "real_stack", None)
        if inside and is_ours(self.output.compiler_fn):
            frames = (*get_stack_above_dynamo(), *inside)
            places = tuple((x.filename, x.lineno or 0) for x in frames)
            _breaks.setdefault(places[-1], GraphBreak(str(exc), places))
        return original(self, code_options, reason, exc, **more)

    InstructionTranslatorBase.log_graph_break = log_graph_break  # type: ignore[method-assign]


def breaks() -> tuple[GraphBreak, ...]:
    """Return the breaks since the last `forget`, in order."""
    return tuple(_breaks.values())


def break_at(place: SourceLine) -> GraphBreak | None:
    """Return the break at a line, or None."""
    return _breaks.get(place)


def forget() -> None:
    """Start anew, as for another program."""
    _breaks.clear()


@contextmanager
def noted_apart() -> Iterator[None]:
    """Note the breaks inside of the block, and forget them after it."""
    before = dict(_breaks)
    forget()
    try:
        yield
    finally:
        forget()
        _breaks.update(before)


def reason_text(text: str) -> str:
    """Return torch's reason in one line, with the short name of what breaks."""
    lines = text.strip().splitlines() or ["no reason"]
    what = next((x for x in lines if _WHAT in x), "").partition(_WHAT)[2].strip()
    is_name = 0 < len(what) <= _LONGEST_NAME and what not in lines[0]
    return f"{lines[0]}: {what}" if is_name else lines[0]


def is_ours(callback: Any) -> bool:
    """Tell whether a callback of Dynamo ends in backend "cp".

    Where a graph is compiled under DDP, a method of DDPOptimizer calls the backend.
    """
    while callback is not None:
        if getattr(callback, "compiler_name", None) == "cp":
            return True
        optimizer = getattr(callback, "__self__", None)
        under_ddp = getattr(optimizer, "backend_compile_fn", None)
        callback = getattr(callback, "_torchdynamo_orig_backend", under_ddp)
    return False
