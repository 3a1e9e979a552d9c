"""The command line: what it refuses, what it does not import, and how long it takes."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpcompile.apps.cli.main import main
from tests.unit.cli.test_import import run as run_alone

ROOT = Path(__file__).parents[3]
LLAMA = ("plan", "--model", "llama3-8b", "--seq", "8192")
# Of plan, on a machine that does nothing else.
MOST_SECONDS = 3.0


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of the command in this process."""
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def in_a_process(*arguments):
    """A whole process, as a user starts it."""
    command = [sys.executable, "-m", "cpcompile", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


CP = (*LLAMA, "--cp", "8")
FIT = ("plan", "--fit", "--model", "llama3-8b", "--gpus", "1,8,32")
MISTAKES = [
    ((), ": the following arguments are required: COMMAND"),
    (("paln",), ": argument COMMAND: invalid choice: 'paln' (choose from 'check', "
     "'plan', 'doctor', 'verify', 'trace', 'calibrate')"),
    (("plan",), " plan: needs --cp (or --gpus), the number of ranks"),
    (LLAMA, " plan: needs --cp (or --gpus), the number of ranks"),
    (("plan", "--model", "llama3-8b", "--cp", "8"), " plan: needs --seq"),
    (("plan", "--seq", "1k", "--cp", "8"),
     " plan: needs --model, or --heads and --head-dim"),
    (("plan", "--seq", "1k", "--cp", "8", "--heads", "8"),
     " plan: needs --model, or --head-dim"),
    ((*CP, "--model", "lama3-8b"), " plan: model 'lama3-8b' is unknown: there are "
     "llama2-7b, llama2-13b, "),
    ((*CP, "--hardware", "h1000"), " plan: hardware profile 'h1000' is unknown: "),
    ((*CP, "--hardware", "none.json"), " plan: none.json: "),
    ((*CP, "--seq", "0"), " plan: argument --seq: '0' is no positive integer"),
    ((*CP, "--seq", "1.5k"), " plan: argument --seq: '1.5k' is no positive integer"),
    ((*CP, "--heads", "-4"), " plan: argument --heads: '-4' is no positive integer"),
    ((*CP, "--batch", "x"), " plan: argument --batch: 'x' is no positive integer"),
    ((*CP, "--cp", "8..2"), " plan: argument --cp/--gpus: '8..2' is not like 8, 2,4,8 "
     "or 1..1024 (1 to 65536 ranks)"),
    ((*CP, "--memory-budget", "lots"), " plan: argument --memory-budget: 'lots' is no "
     "positive number of bytes, such as 8GiB or 8589934592"),
    ((*CP, "--override", "launch"),
     " plan: argument --override: 'launch' is not NAME=VALUE: there is no ="),
    ((*CP, "--override", "launch=fast"), " plan: argument --override: 'launch=fast' is "
     "not NAME=VALUE: 'fast' is no number"),
    ((*CP, "--override", "overlap_fraction=2"),
     " plan: overrides: 'overlap_fraction' is 2.0; it must be from 0 to 1"),
    ((*CP, "--kv-heads", "5"), " plan: every strategy is impossible here: 32 query "
     "heads are not a multiple of 5 key/value heads; repeat the key/value heads in the "
     "model"),
    (FIT, " plan: --fit needs --memory"),
    ((*FIT, "--memory", "80G", "--offload", "x"), " plan: cp.fit: offload has 'x'"),
    (("plan", "--fit", "--model", "flux", "--cp", "8", "--memory", "80G"),
     " plan: --fit needs --hidden, --feed-forward, --vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), MISTAKES)
def test_mistakes_are_one_line(capsys, arguments, text):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1, err
    assert err.startswith(f"cpcompile{text}")
    if "is unknown" in text:
        assert "did you mean " in err


def test_help_is_no_mistake(capsys):
    code, out, err = run(capsys, "plan", "--help")
    assert (code, err) == (0, "")
    assert "--ranks-per-node" in out
    assert run(capsys, "--help")[0] == 0
    code, out, _ = run(capsys, "calibrate", "--help")  # which has its own
    assert code == 0 and out.startswith("usage: cpcompile calibrate")


def test_plans_need_neither_torch_nor_matplotlib():
    program = (
        "import sys, cpcompile; from cpcompile.apps.cli.main import main; "
        "code = main(['plan', '--model', 'llama3-8b', '--seq', '128k', '--cp', '8']); "
        "cpcompile.plan(batch=1, heads=8, kv_heads=8, head_dim=64, seq=9, ranks=3); "
        "print(code, [m for m in ('torch', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    assert run_alone(program).splitlines()[-1] == "0 []"


def test_a_sweep_is_quick():
    """Processor time, which other processes lengthen less than the clock's."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = in_a_process(
        "plan", "--model", "llama3-8b", "--seq", "128k", "--cp", "1..1024"
    )
    seconds, after = (
        time.perf_counter() - start,
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    assert done.returncode == 0, done.stderr
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if os.getloadavg()[0] < 1:
        assert seconds < MOST_SECONDS
    assert used < 2 * MOST_SECONDS


def test_a_reader_that_has_seen_enough():
    """`cpcompile plan ... | head -1`"""
    command = [sys.executable, "-m", "cpcompile", *LLAMA, "--cp", "2..64", "--json"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (0, "")
    process.stderr.close()
