"""Which tests run without being named: those that fit into five minutes on two cores.

tests/durations.json has the seconds of every test function, and tests/guards.txt the
cases that guard most where those are not the first ones; `tools/test --record` writes
the former. All cases stand in one order, of what they cost for what they cover. A run
takes them in this order until its budget is spent; --all=K/N takes the K-th of N equal
parts of the others, so that the first parts are worth most; --all takes all. Named
files run whole.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"
GUARDS = HERE / "guards.txt"

VARIABLE = "CPCOMPILE_TESTS"  # nothing, "all" or "all=K/N"
LANE = "CPCOMPILE_LANE"  # "1/2": this process takes the first of two halves

# Five minutes on two cores, less imports, collecting, and what is between tests.
BUDGET_SECONDS = 2 * (5 * 60 - 80)
LONG_SECONDS = BUDGET_SECONDS / 40  # of a case that is not taken for its file alone

# Start processes or compilers.
COMPILING = ("tests/cpu/", "tests/models/", "tests/inductor/", "tests/kernels/")

GUESSED_SECONDS = {  # what a case takes of which nothing is recorded
    "tests/cpu/compiled/": 60.0,
    "tests/cpu/composition/test_howto.py": 100.0,
    "tests/inductor/": 20.0,
    "tests/models/": 10.0,
    **dict.fromkeys(COMPILING, 4.0),
    "tests/golden/": 0.5,
    "": 0.1,
}

# What changes with torch, or with tools: run when torch is not the recorded one.
WITH_TORCH = ("tests/unit/torch_patches/", "tests/unit/tools/")
# But these compare our code with our own documents.
OURS = ("tests/unit/torch_patches/test_internals.py",)


@dataclass(frozen=True)
class Durations:
    """What tests/durations.json says."""

    torch: str = ""  # the version with which the tests of WITH_TORCH passed
    entries: Mapping[str, Sequence[Any]] | None = None  # None: nothing is recorded

    @classmethod
    def read(cls, path: Path = DURATIONS) -> Durations:
        """Read the file; one that is missing says nothing."""
        if not path.exists():
            return cls()
        content = json.loads(path.read_text())
        files = content["tests"].items()
        entries = {f"{file}::{x}": y for file, row in files for x, y in row.items()}
        return cls(content["torch"], entries)

    def is_known(self, function: str) -> bool:
        """Tell whether a case of the function was ever timed."""
        return self.entries is not None and function in self.entries

    def seconds(self, case: str) -> float:
        """Return what a case takes, or a guess."""
        function, parameters = split(case)
        if self.entries is not None and function in self.entries:
            typical, _, others, *_ = self.entries[function]
            return float(others.get(parameters, typical))
        return next(y for x, y in GUESSED_SECONDS.items() if case.startswith(x))

    def lines(self, function: str) -> int | None:
        """Return how many lines it covers that cheaper ones do not, if recorded."""
        entry = (self.entries or {}).get(function, ())
        return entry[3] if len(entry) > 3 else None


def split(case: str) -> tuple[str, str]:
    """Split an id of pytest into that of the function, and the parameters."""
    function, _, parameters = case.partition("[")
    return function, parameters.removesuffix("]")


def runs_all() -> bool:
    """Tell whether --all or --all=K/N was given to tools/test."""
    return os.environ.get(VARIABLE, "").startswith("all")


def guards(path: Path = GUARDS) -> dict[str, list[str]]:
    """Read the ids of cases that are preferred, by function."""
    preferred = defaultdict(list)
    for line in path.read_text().splitlines():
        preferred[split(line)[0]].append(line)
    return preferred


def by_value(
    cases: Iterable[str], durations: Durations, preferred: Mapping[str, Sequence[str]]
) -> list[str]:
    """Order all cases by seconds per line that they cover, the best first.

    One case of each file stands before all others, of a preferred function if there is
    one, unless it takes long. Where lines are not recorded, the second cheapest
    function of a file is taken to cover half as much as the cheapest, and so on. So is
    the n-th case of a function. What is new comes before what is not.

    Raises: ValueError for a preferred case that does not exist.
    """
    functions: dict[str, list[str]] = {}
    for case in cases:
        functions.setdefault(split(case)[0], []).append(case)
    for function, own in functions.items():
        functions[function] = _spread(own, preferred.get(function, ()))
    seconds = {x: durations.seconds(own[0]) for x, own in functions.items()}
    recorded = [n for x in functions if (n := durations.lines(x)) is not None]
    typical = 1 + (median(recorded) if recorded else 0)
    places: dict[str, int] = defaultdict(int)
    gains, firsts = {}, dict[str, tuple[bool, float, str]]()
    for function in sorted(functions, key=lambda x: (seconds[x], x)):
        file, lines = function.partition("::")[0], durations.lines(function)
        places[file] += 1
        gain = gains[function] = typical / places[file] if lines is None else 1 + lines
        mine = (function not in preferred, seconds[function] / gain, function)
        if seconds[function] <= LONG_SECONDS:
            firsts[file] = min(firsts.get(file, mine), mine)
    first = {function for *_, function in firsts.values()}
    prices = {}
    for function, own in functions.items():
        is_new = durations.entries is not None and not durations.is_known(function)
        for n, case in enumerate(own, 1):
            price = durations.seconds(case) * n / gains[function]
            is_first = n == 1 and function in first
            prices[case] = (not is_first, not is_new, price, case)
    return sorted(prices, key=prices.__getitem__)


def _spread(cases: Sequence[str], first: Sequence[str]) -> list[str]:
    """Put `first` first, then that in the list, in its middle, in its quarters, ..."""
    if missing := [x for x in first if x not in cases]:
        raise ValueError(
            f"tests/guards.txt: got {missing[0]!r}; needed the id of a case of that "
            f"test, such as {cases[0]!r}"
        )
    bits = len(cases).bit_length()
    order = sorted(range(len(cases)), key=lambda i: f"{i:0{bits}b}"[::-1])
    return [*first, *(cases[i] for i in order if cases[i] not in first)]


def selected(
    cases: Sequence[str],
    durations: Durations,
    preferred: Mapping[str, Sequence[str]],
    wish: str = "",
    torch: str = "",
) -> set[str]:
    """Choose the cases that run: by budget, "all", or a part "all=K/N" of the others.

    torch: its version in this environment.

    Raises: ValueError for another wish, and for a preferred case that does not exist.
    """
    if wish == "all":
        return set(cases)
    order = by_value(cases, durations, preferred)
    with_torch = {x for x in order if x.startswith(WITH_TORCH)}
    with_torch -= {x for x in with_torch if x.startswith(OURS)}
    if durations.torch == "":
        with_torch = set()
    chosen = set() if torch == durations.torch else set(with_torch)
    left = BUDGET_SECONDS
    for case in order:
        if case not in with_torch and durations.seconds(case) <= left:
            left -= durations.seconds(case)
            chosen.add(case)
    if not wish:
        return chosen
    seconds = {x: durations.seconds(x) for x in order if x not in chosen}
    return part(seconds, wish.removeprefix("all="))


def lane(cases: Iterable[str], durations: Durations, which: str) -> set[str]:
    """Choose the half "1/2" or "2/2" of the files.

    Those with processes and compilers come first, so that few sets of processes are
    started twice.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        files[case.partition("::")[0]].append(case)
    order = sorted(files, key=lambda x: (not x.startswith(COMPILING), x))
    seconds = {x: sum(map(durations.seconds, files[x])) for x in order}
    return {case for file in part(seconds, which) for case in files[file]}


def part(seconds: Mapping[str, float], which: str) -> set[str]:
    """Cut what takes `seconds` into parts that take equally long; return "K/N".

    Raises: ValueError unless 1 <= K <= N.
    """
    k, n = map(int, which.split("/")) if re.fullmatch(r"\d+/\d+", which) else (0, 0)
    if not 1 <= k <= n:
        raise ValueError(f"got part {which!r}; needed K/N with 1 <= K <= N, as in 2/24")
    taken = {name: max(own, 0.001) for name, own in seconds.items()}
    total, before = sum(taken.values()), 0.0
    chosen = set()
    for name, own in taken.items():
        if (k - 1) * total <= n * (before + own / 2) < k * total:
            chosen.add(name)
        before += own
    return chosen


def summary(
    cases: Sequence[str], chosen: set[str], taken: set[str], durations: Durations
) -> list[str]:
    """Say what a lane takes of what is chosen, how long it takes, and what is new."""
    functions, every = ({split(x)[0] for x in found} for found in (taken, cases))
    seconds, others = (
        sum(map(durations.seconds, found)) for found in (taken, {*cases} - chosen)
    )
    text = (
        f"{len(taken)} of {len(cases)} cases, {len(functions)} of {len(every)} test "
        f"functions, about {seconds:.0f} s; the others take an hour each with "
        f"--all=K/{math.ceil(others / (2 * 3600))}"
    )
    if durations.entries is None:
        return [f"{text}. These are guesses: record durations by tools/test --record"]
    new = sorted(x for x in every if not durations.is_known(x))
    if not new:
        return [text]
    files = " ".join(sorted({x.partition("::")[0] for x in new})[:5])
    return [
        text,
        f"{len(new)} test functions without a recorded duration, which run first, such "
        f"as {new[0]}; record them: tools/test --record {files}",
    ]
