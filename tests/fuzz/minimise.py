"""Makes a failing program smaller while its verdict stays.

Delta debugging over statements: halves, quarters, ... and single ones are left out, a
region is replaced by its body, choices and settings by the simplest ones; again until
nothing changes or time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.kinds import KINDS
from tests.fuzz.program import Program, Setting, Statement

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails, seconds: float) -> Program:
    """The smallest program found for which `fails` holds; it holds for `program`."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _candidates:
            for candidate in smaller(program):
                if time.monotonic() > end:
                    return program
                if fails(candidate):
                    program, changed = candidate, True
                    break  # candidates of the smaller one
    return program


def _without_many(program: Program) -> Iterator[Program]:
    """Without a half, a quarter, ... of the statements."""
    names = [s.name for s in program.statements]
    size = len(names) // 2
    while size >= 1:
        for start in range(0, len(names), size):
            yield leave_out(program, set(names[start : start + size]))
        size //= 2


def _without_inner(program: Program) -> Iterator[Program]:
    """Without a statement inside of another, or with a body for its region."""
    for statement in program.statements:
        for inside in statement.body:
            yield leave_out(program, {inside.name})
        if statement.body and statement.kind != "views":
            yield _opened(program, statement)


def _shorter(program: Program) -> Iterator[Program]:
    if len(program.losses) > 1:
        for loss in program.losses:
            yield replace(program, losses=(loss,))
    if program.returned:
        yield replace(program, returned=())
    for number in range(1, len(program.sources)):
        name, main = program.sources[number].name, program.sources[0].name
        kept = program.sources[:number] + program.sources[number + 1 :]
        yield _renamed(replace(program, sources=kept), {name: main})


def _simpler_choices(program: Program) -> Iterator[Program]:
    for statement in program.walk():
        if statement.kind not in KINDS:
            continue
        plain = [(c, values[0]) for c, values in KINDS[statement.kind].choices.items()]
        odd = [x for x in plain if x not in statement.choices]
        if len(odd) > 1:
            yield _changed(program, replace(statement, choices=tuple(plain)))
        for choice, value in odd:
            yield _changed(program, statement.with_choice(choice, value))


def _simpler_setting(program: Program) -> Iterator[Program]:
    setting, plain = program.setting, Setting()
    names = [
        "lengths", "growth", "dynamic", "mode", "inner", "door", "layout", "strategy",
        "unroll", "gather_outputs_megabytes", "strict", "batch", "heads",
    ]  # fmt: skip
    for name in names:
        value = getattr(plain, name)
        if name == "lengths":
            value = setting.lengths[:1]
        if name == "heads":
            value = min(setting.heads, 2)
        if value != getattr(setting, name):
            width = setting.width // setting.heads * value if name == "heads" else None
            changes = {name: value} | ({} if width is None else {"width": width})
            yield replace(program, setting=replace(setting, **changes))
    if setting.lengths not in ((8,), (9,)) and len(setting.lengths) == 1:
        for length in (8, 9):
            if length < setting.lengths[0]:
                yield replace(program, setting=replace(setting, lengths=(length,)))


_candidates = (
    _without_many, _without_inner, _shorter, _simpler_setting, _simpler_choices,
)  # fmt: skip


def leave_out(program: Program, names: set[str]) -> Program:
    """Without these statements: the first operand of each stands for its value."""
    instead = {
        s.name: s.operands[0] for s in program.walk() if s.name in names and s.operands
    }
    smaller = _mapped(program, lambda s: None if s.name in names else s)
    return _renamed(replace(program, statements=smaller.statements), instead)


def _mapped(
    program: Program, change: Callable[[Statement], Statement | None]
) -> Program:
    """With what `change` makes of every statement; None leaves one out."""

    def mapped(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
        changed = [y for y in map(change, statements) if y is not None]
        return tuple(replace(s, body=mapped(s.body)) for s in changed)

    return replace(
        program,
        sources=mapped(program.sources),
        statements=mapped(program.statements),
        losses=mapped(program.losses),
    )


def _opened(program: Program, region: Statement) -> Program:
    """With the body of a region in its place."""
    place = program.statements.index(region)
    before, after = program.statements[:place], program.statements[place + 1 :]
    opened = replace(program, statements=(*before, *region.body, *after))
    last = region.body[-1].name
    return _renamed(opened, {region.name: last, "-" + region.name: region.operands[0]})


def _renamed(program: Program, instead: dict[str, str]) -> Program:
    """With other values in place of some."""

    def final(name: str) -> str:
        while name in instead:
            name = instead[name]
        return name

    renamed = _mapped(
        program, lambda s: replace(s, operands=tuple(map(final, s.operands)))
    )
    return replace(renamed, returned=tuple(map(final, program.returned)))


def _changed(program: Program, statement: Statement) -> Program:
    """With another statement under the same name."""
    return _mapped(program, lambda s: statement if s.name == statement.name else s)
