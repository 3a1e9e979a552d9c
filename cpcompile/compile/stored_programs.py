"""Load a compiled program that an earlier start has kept, on all ranks or on none.

A rank that loads its program while another compiles would leave the exchanges of the
compilation out, and may run a program that does not fit to those of the others. So
programs carry the mark of the compilation that made them together. Each rank says the
mark of the program that it could load; unless all say the same, all compile, under a
new mark.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cpcompile.compile import torch_cache
from cpcompile.compile.torch_cache import ProgramKey

T = TypeVar("T")

AllGatherText = Callable[[str], Sequence[str]]


@dataclass
class CompilationFindings:
    """What compiling has found in addition to the program, to report and compare.

    lists: by name; compiling appends to them. texts: set when the graphs are there.
    """

    lists: dict[str, list[Any]]
    texts: Callable[[], dict[str, str]]


@dataclass(frozen=True)
class Kept:
    """The data stored with a program; `mark` names the compilation that made it."""

    mark: str
    lists: dict[str, list[Any]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def load_or_compile(
    compile_program: Callable[[bool], T],
    key: ProgramKey | None,
    findings: CompilationFindings,
    all_gather_text: AllGatherText,
) -> tuple[T, dict[str, str]]:
    """Load the program if all ranks have kept it, else compile and keep it.

    Returns: the program, and the texts found with it.

    Args:
        compile_program: takes whether AOTAutograd's cache is to be used.
        key: None if there is none, then all ranks compile and none keeps.
        all_gather_text: takes a text of this rank, and gives those of all ranks.
    """
    loaded, stored = (None, Kept("")) if key is None else _loaded(compile_program, key)
    texts = all_gather_text(
        json.dumps((stored.mark, secrets.token_hex(8), key is not None))
    )
    answers = [json.loads(text) for text in texts]
    if loaded is not None and all(mark == stored.mark for mark, _, _ in answers):
        for name, values in stored.lists.items():
            findings.lists[name].extend(values)
        return loaded, stored.texts
    if key is None or not all(has_key for _, _, has_key in answers):
        return compile_program(False), findings.texts()
    mark: str = answers[0][1]
    with torch_cache.keeping(key, lambda: Kept(mark, findings.lists, findings.texts())):
        return compile_program(True), findings.texts()


def _loaded(
    compile_program: Callable[[bool], T], key: ProgramKey
) -> tuple[T | None, Kept]:
    try:
        with torch_cache.finding(key) as notes:
            program = compile_program(True)
    except Exception:  # it is not there, or cannot be read: then all compile
        return None, Kept("")
    if len(notes) == 1 and isinstance(notes[0], Kept):
        return program, notes[0]
    return None, Kept("")
