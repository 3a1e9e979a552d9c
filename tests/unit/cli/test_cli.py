"""The command line: what it prints and refuses, and how long it takes."""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cpcompile as cp
from cpcompile.apps.cli.main import main
from cpcompile.apps.cli.plan_arguments import (
    _count,
    _override,
    _ranks,
    bytes_of_text,
)
from cpcompile.cost.plain_data import to_dict
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


WORDS = {
    _ranks: {
        "8": (8,), "2,4,8": (2, 4, 8), "1..8": (1, 2, 4, 8), "3..24": (3, 6, 12, 24),
        "4..4": (4,), "2..5": (2, 4), "1..4,3, 4": (1, 2, 4, 3),
        "1..1024": tuple(2**i for i in range(11)),
    },
    bytes_of_text: {
        "1": 1, "8589934592": 2**33, "8GiB": 2**33, "8 gib": 2**33, "1.5MiB": 1572864,
        "80GB": 80e9, "2k": 2000, "3Ki": 3072,
    },
    _count: {"7": 7, "128k": 131072, "1M": 2**20},
    _override: {"overlap_fraction = 0.5": ("overlap_fraction", 0.5)},
}  # fmt: skip


@pytest.mark.parametrize("read", WORDS)
def test_words(read):
    assert {text: read(text) for text in WORDS[read]} == WORDS[read]


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (_ranks, ["", "0", "-1", "8..", "..8", "1...8", "a", "1,,2"], "is not like 8"),
        (_ranks, ["1..100000"], "1 to 65536 ranks"),
        (bytes_of_text, ["0", "-1", "GiB", "1XB", "i", "1 i"], "no positive number of"),
    ],
)
def test_words_that_are_no_numbers(read, texts, message):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            read(text)


SIZES = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq": 8192}


def test_a_sweep_prints_a_line_per_number_of_ranks(capsys):
    _, out, _ = run(capsys, *LLAMA, "--cp", "4")
    ms = 1e3 * cp.plan(**SIZES, ranks=4).chosen.seconds
    assert out.startswith("llama3-8b, 32 layers: 8192 tokens, batch 1, 32 query and 8")
    times = f"{ms:.3f} ms per layer, {32 * ms:.3f} ms over 32 layers"
    assert f", {times}; runner-up " in out
    code, out, _ = run(capsys, *LLAMA, "--cp", "1..1024")
    assert code == 0
    numbers = [line.split()[0] for line in out.splitlines()[3:]]
    assert numbers == ["ranks", *(str(2**i) for i in range(11))]
    _, out, _ = run(capsys, *LLAMA, "--cp", "2,4", "--candidates")
    assert out.count("excluded because") == 2
    assert "2 ranks: " in out and "4 ranks: " in out
    budget = ("--memory-budget", "8MiB")
    code, out, _ = run(capsys, *LLAMA, "--cp", "2,256", *budget)
    assert code == 0
    assert "2  none: every strategy is impossible here" in out
    code, out, _ = run(capsys, *LLAMA, "--cp", "2,256", *budget, "--json")
    first, second = json.loads(out)
    assert first["ranks"] == 2 and "smallest need" in first["error"]
    assert second["workload"]["ranks"] == 256


def test_json_is_the_plan(capsys):
    given = (
        "--cp 8 --json --override merge_bytes_per_element=44 --direction forward "
        "--dtype float32 --ranks-per-node 4 --memory-budget 1GiB --batch 2 "
        "--hardware A100 --relayout"
    )
    code, out, err = run(capsys, *LLAMA, *given.split())
    assert (code, err) == (0, "")
    expected = cp.plan(
        **SIZES | {"batch": 2, "ranks": 8},
        direction="forward",
        dtype="float32",
        ranks_per_node=4,
        memory_budget=2**30,
        hardware="a100",
        relayout=True,
        overrides={"merge_bytes_per_element": 44},
    )
    assert json.loads(out) == json.loads(json.dumps(to_dict(expected)))


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (
            "--heads 12 --kv-heads 4 --head-dim 64 --no-causal --seq 1k",
            {"heads": 12, "kv_heads": 4, "head_dim": 64, "causal": False},
        ),
        ("--model llama3-8b --kv-heads 32 --seq 8k", {"kv_heads": 32}),
        (
            "--model deepseek-v3 --seq 4k",
            {"head_dim": 192, "value_dim": 128, "q_len": 4096},
        ),
    ],
)
def test_sizes_instead_of_a_name_or_beside_it(capsys, arguments, sizes):
    code, out, _ = run(capsys, "plan", *arguments.split(), "--cp", "2", "--json")
    assert code == 0
    assert sizes.items() <= json.loads(out)["workload"].items()


def test_mixers_of_a_hybrid_stand_below_its_attention(capsys):
    _, out, _ = run(capsys, "plan", "--model", "gemma2-9b", "--seq", "8k", "--cp", "2")
    windows = "not counted: 21 more layers with a sliding window of 4096 tokens"
    assert windows in out.splitlines()
    call = ("plan", "--model", "qwen3.5", "--seq", "64k")
    _, out, _ = run(capsys, *call, "--cp", "8,16")
    words, eight, sixteen = out.splitlines()[-3:]
    assert words == "mixers, with ms of each call beyond an even share of its work:"
    rules = "mixer gated_delta_rule (24 calls) at qwen3.5: "
    assert eight.startswith(f"8 ranks: {rules}exchange along heads, ")
    assert sixteen.startswith(f"16 ranks: {rules}states, ")
    _, out, _ = run(capsys, *call, "--cp", "8", "--json")
    record = json.loads(out)
    # Mixers have tokens in their natural order, which costs relayouts.
    assert record["attention"]["workload"]["relayout"]
    assert (
        record["mixers"]["strategy"] == "exchange" and record["mixers"]["calls"] == 24
    )
    _, out, _ = run(capsys, *call, "--cp", "8,16", "--json")
    assert [x["strategy"] for x in json.loads(out)["mixers"]] == ["exchange", "states"]


def test_plot(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    code, _, err = run(capsys, *LLAMA, "--cp", "2,4", "--plot", str(path))
    assert (code, err) == (0, f"wrote {path}\n")
    picture = path.read_text(encoding="utf-8")
    assert ">2 ranks: crossovers<" in picture and ">4 ranks: crossovers<" in picture


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/plan.svg", "[Errno 2] No such file or directory"),
        ("plan.html", "Format 'html' is not supported (supported formats: "),
        ("", 'pictures need matplotlib: pip install "cpcompile[plot]"\n'),
    ],
)
def test_a_picture_that_cannot_be_written_is_one_line(
    capsys, tmp_path, monkeypatch, name, message
):
    if not name:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, *LLAMA, "--cp", "2", "--plot", str(tmp_path / name))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f"cpcompile plan: {message}")


FITTED = ["plan", "--fit", "--model", "llama3-8b", "--gpus", "1,8,32"]


def test_what_fits_beside_published_figures(capsys):
    assert main([*FITTED, "--memory", "80G", "--fsdp", "--checkpoint", "--tile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoints" in lines[0] and "s per step" in lines[0]
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert "none" in rows["1"] and "500,000" in rows["1"]
    assert "3,700,000 a, 5,000,000 b" in rows["8"] and "15,000,000 a" in rows["32"]
    assert any("Arctic Long Sequence Training" in x for x in lines)
    assert main([*FITTED, "--memory", "141G", "--fsdp", "--checkpoint"]) == 0
    assert "15,000,000" not in capsys.readouterr().out  # of another machine
    given = ["--memory", "80G", "--fsdp", "--offload", "optimizer", "--json"]
    assert main([*FITTED, *given]) == 0
    one, eight, _ = json.loads(capsys.readouterr().out)
    assert eight["tokens"] > one["tokens"]
    assert eight["memory"]["optimizer"] == 0
    sizes = ["--heads", "8", "--head-dim", "64", "--layers", "4", "--hidden", "512"]
    more = ["--feed-forward", "2048", "--vocabulary", "32000", "--memory", "16G"]
    assert main(["plan", "--fit", *sizes, *more, "--cp", "2"]) == 0
    assert "published" in capsys.readouterr().out.splitlines()[0]
