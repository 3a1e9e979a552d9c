"""Which of the many cases of a test run every time: few that cover all values.

Cases of tests/cpu start programs on several processes. What is chosen depends on the
cases alone: each adds most of the values that no case before it has. A case that
Inductor compiles to C++ takes several times as long, so that only the first is one, and
those whose values no other case has. Where several will do it is one on two ranks.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import pytest

FEW = 4  # cases of one test that run in any case

Value = tuple[str, str]  # an axis and a value of it
INDUCTOR: Value = ("", "inductor")


def chosen_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of all cases of one test those that run every time: FEW, or a quarter of them."""
    cases = {}
    for item in items:
        values = _values(getattr(item, "callspec", None))
        marked = item.get_closest_marker("inductor") is not None
        if marked or any(value == "inductor" for _, value in values):
            values.add(INDUCTOR)
        cases[item.name] = frozenset(values)
    names = chosen_cases(cases, max(FEW, len(items) // 4))
    return [item for item in items if item.name in names]


def chosen_cases(cases: Mapping[str, frozenset[Value]], limit: int) -> list[str]:
    """At most `limit` names of cases, whose values these are."""
    chosen: list[str] = []
    seen: set[Value] = set()
    left = sorted(cases, key=lambda name: (_far_from_two(cases[name]), _number(name)))
    costly = [name for name in left if INDUCTOR in cases[name]]
    while left and len(chosen) < limit:
        more = [name for name in left if cases[name] - seen]
        cheap = [name for name in left if name not in costly]
        usual = [name for name in more if name in cheap] or more or cheap
        among = usual if chosen else costly or left
        if not among:
            break  # the costly ones that are left have no other value
        best = max(among, key=lambda name: len(cases[name] - seen))
        chosen.append(best)
        left.remove(best)
        seen |= cases[best]
    return chosen


def _values(callspec: object) -> set[Value]:
    """What the parameters of a case are; dicts, dataclasses and tuples are opened."""
    return _opened("", getattr(callspec, "params", {}))


def _opened(axis: str, value: object) -> set[Value]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {(axis, str(value))}
    parts = (_opened(f"{axis} {name}", part) for name, part in value.items())
    return set().union(*parts)


def _far_from_two(values: frozenset[Value]) -> int:
    """Cases on many ranks take longer, and one rank has nobody to talk to."""
    ranks = [int(x) for axis, x in values if axis.endswith("world") and x.isdigit()]
    return abs(max(ranks, default=2) - 2)


def _number(name: str) -> int:
    """The same in every run, and nothing to do with what a case is."""
    return zlib.crc32(name.encode())
