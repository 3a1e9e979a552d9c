"""Train a small GPT with its sequence over several CPU ranks, and on one process.

Both runs see the same text, seed and batches, so their losses must agree; the exit code
is 1 if they part, 2 if a run failed. The model is in gpt.py, the training in
demo_train.py, where `torch.compile(model, backend="cp")` is the only difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.demo_train import Result, Task

ROOT = Path(__file__).resolve().parent.parent

# float32 sums in another order; 30 steps of AdamW keep them two orders below this.
LARGEST_DIFFERENCE = 1e-4


class RunFailed(Exception):
    """A training run ended without a result."""


def main() -> int:
    parser = make_parser()
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        try:
            text.write_bytes(read_text(given.text))
            task = make_task(given, text)
        except ValueError as error:
            parser.error(str(error))
        try:
            ours = run(task, folder)
            alone = run(replace(task, ranks=None), folder)
        except RunFailed as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
    return report(task, ours, alone)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/demo",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="one thread each")
    parser.add_argument("--text", type=Path, help="a file to train on (else the docs)")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="of each attention")
    parser.add_argument(
        "--strategy",
        default="auto",
        choices=("auto", "ring", "all_gather"),
        help="of all attention",
    )
    parser.add_argument(
        "--inner",
        default="inductor",
        choices=("inductor", "aot_eager"),
        help="compiler of both runs",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    return parser


def read_text(path: Path | None) -> bytes:
    """Read the file, or README.md and docs/*.md.

    Raises: ValueError if there is no such file.
    """
    if path is None:
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        return b"\n".join(page.read_bytes() for page in pages)
    if not path.is_file():
        raise ValueError(f"--text {path}: there is no such file")
    return path.read_bytes()


def make_task(given: argparse.Namespace, text: Path) -> Task:
    """Make the task that is asked for.

    Raises: ValueError for sizes that cannot be trained.
    """
    for name, least in (
        ("ranks", 1),
        ("batch", 1),
        ("steps", 2),  # the first one compiles and is not timed
        ("layers", 1),
        ("heads", 1),
        ("seq", max(2, given.ranks)),
    ):
        if getattr(given, name) < least:
            raise ValueError(
                f"--{name}: got {getattr(given, name)}; needed {least} or more"
            )
    if given.width < 1 or given.width % given.heads:
        raise ValueError(
            f"--width: got {given.width}; needed a multiple of --heads {given.heads}"
        )
    length = text.stat().st_size
    if given.seq > length:
        raise ValueError(
            f"--seq: got {given.seq} tokens, and the text has {length} bytes; "
            "needed a shorter --seq or a longer --text FILE"
        )
    return Task(**{**vars(given), "text": str(text)})


def run(task: Task, folder: Path) -> Result:
    """Train in fresh processes; raise RunFailed if they leave no result."""
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable]
    if task.ranks is not None:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(task.ranks)]
    command += ["-m", "tools.demo_train", str(folder)]
    code = subprocess.call(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if code or not result.exists():
        name = "one process" if task.ranks is None else f"{task.ranks} ranks"
        raise RunFailed(f"the run on {name} ended with exit code {code}; see above")
    return Result(**json.loads(result.read_text()))


def report(task: Task, ours: Result, alone: Result) -> int:
    """Print both runs side by side; return the exit code."""
    console = Console()
    tokens = task.batch * task.seq
    rates = [tokens / statistics.median(r.seconds[1:]) for r in (ours, alone)]
    difference = max(abs(a - b) for a, b in zip(ours.losses, alone.losses, strict=True))
    table = Table(title=f"{task.steps} steps of {tokens} tokens, {task.inner}")
    table.add_column("")
    table.add_column(f'{task.ranks} ranks, backend="cp"', justify="right")
    table.add_column("1 process", justify="right")
    for row in (
        ("first loss", f"{ours.losses[0]:.6f}", f"{alone.losses[0]:.6f}"),
        ("last loss", f"{ours.losses[-1]:.6f}", f"{alone.losses[-1]:.6f}"),
        ("tokens/s", *(f"{rate:,.0f}" for rate in rates)),
        ("first step, compiles", *(f"{r.seconds[0]:.1f} s" for r in (ours, alone))),
    ):
        table.add_row(*row)
    console.print(table)
    print(f"one thread per process; speed-up {rates[0] / rates[1]:.2f}")
    print(ours.explanation)
    agree = difference <= LARGEST_DIFFERENCE  # not a number is no agreement
    print(
        f"largest difference of the losses over all steps: {difference:.1e}, "
        f"{'within' if agree else 'MORE THAN'} {LARGEST_DIFFERENCE:.0e}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
