"""What a run of the fuzzer prints and writes: failures as scripts, and a table."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

from tests.fuzz import on_rank
from tests.fuzz.judge import Outcome, Verdict
from tests.fuzz.program import Program
from tests.fuzz.render import render

SCRIPT = Path(__file__).with_name("script.py")
COPIED = (on_rank.plain, on_rank.door_of, on_rank.make_model, on_rank.steps)


def script(program: Program, outcome: Outcome | None = None) -> str:
    """The program as a file of its own, for torchrun."""
    note = ""
    if outcome is not None:
        said = [f"# {line}".rstrip() for line in outcome.details.splitlines()]
        note = "\n".join(
            ["", f"# {outcome.verdict.value}: {outcome.reason}", *said, ""]
        )
    functions = "\n\n".join(map(inspect.getsource, COPIED))
    imports, _, rest = SCRIPT.read_text().partition("from tests.fuzz")
    _, main = rest.split("# program above\n")
    return imports + render(program) + note + "\n\n" + functions + main


def write_failure(
    folder: Path, seed: int, program: Program, outcome: Outcome, name: str
) -> Path:
    """Write the script of a failure; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed_{seed}_{name}.py"
    path.write_text(script(program, outcome))
    return path


class Tally:
    """Counts of verdicts, and causes with their seeds."""

    def __init__(self) -> None:
        self.verdicts: Counter[tuple[str, Verdict]] = Counter()
        self.causes: dict[tuple[Verdict, str], list[int]] = {}
        self.calls = [0, 0]
        self.error = 0.0

    def add(self, program: Program, outcome: Outcome) -> bool:
        """Count a program; whether nothing like it was seen before."""
        setting = program.setting
        self.verdicts[f"{setting.inner}, {setting.world} ranks", outcome.verdict] += 1
        if outcome.verdict is Verdict.EQUAL:
            self.error = max(self.error, outcome.error)
            self.calls = [a + b for a, b in zip(self.calls, outcome.calls, strict=True)]
            return False
        seeds = self.causes.setdefault((outcome.verdict, outcome.reason), [])
        seeds.append(program.seed)
        return len(seeds) == 1

    @property
    def faults(self) -> int:
        """Programs that were wrong, crashed or hung by our fault."""
        return sum(n for (_, verdict), n in self.verdicts.items() if verdict.ours)

    def table(self) -> str:
        """Counts per way to run, then every cause with its first seeds."""
        ways = sorted({way for way, _ in self.verdicts})
        names = [verdict.value for verdict in Verdict]
        lines = [f"{'':24}" + "".join(f"{x:>9}" for x in ("programs", *names))]
        for way in [*ways, "all"]:
            counts = [
                sum(
                    n
                    for (of, found), n in self.verdicts.items()
                    if found is verdict and way in (of, "all")
                )
                for verdict in Verdict
            ]
            numbers = "".join(f"{x:>9}" for x in (sum(counts), *counts))
            lines.append(f"{way:24}{numbers}")
        lines.append(
            f"of the equal ones: largest relative error {self.error:.1e}; "
            f"{self.calls[1]} of {self.calls[0]} attention calls shared out"
        )
        for (verdict, reason), seeds in sorted(
            self.causes.items(), key=lambda x: (x[0][0].value, -len(x[1]))
        ):
            some = ", ".join(map(str, seeds[:6])) + (", ..." if len(seeds) > 6 else "")
            lines.append(f"{verdict.value:8} {len(seeds):4}  {reason}  (seeds {some})")
        return "\n".join(lines)
