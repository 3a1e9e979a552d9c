"""What `cpcompile plan` prints: text, JSON and a picture."""

import json
import sys

import pytest

import cpcompile as cp
from cpcompile.apps.cli.main import main
from cpcompile.cost.plain_data import to_dict
from tests.unit.cli.test_cli import LLAMA, run

SIZES = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq": 8192}


def test_a_sweep_prints_a_line_per_number_of_ranks(capsys):
    code, out, _ = run(capsys, *LLAMA, "--cp", "1..1024")
    assert code == 0
    numbers = [line.split()[0] for line in out.splitlines()[3:]]
    assert numbers == ["ranks", *(str(2**i) for i in range(11))]
    _, out, _ = run(capsys, *LLAMA, "--cp", "2,4", "--candidates")
    assert out.count("excluded because") == 2
    assert "2 ranks: " in out and "4 ranks: " in out


def test_a_number_of_ranks_without_a_plan_stays_in_the_sweep(capsys):
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


def test_published_figures_stand_beside(capsys):
    assert main([*FITTED, "--memory", "80G", "--fsdp", "--checkpoint", "--tile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoints" in lines[0] and "s per step" in lines[0]
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert "none" in rows["1"] and "500,000" in rows["1"]
    assert "3,700,000 a, 5,000,000 b" in rows["8"] and "15,000,000 a" in rows["32"]
    assert any("Arctic Long Sequence Training" in x for x in lines)
    assert main([*FITTED, "--memory", "141G", "--fsdp", "--checkpoint"]) == 0
    assert "15,000,000" not in capsys.readouterr().out  # of another machine


def test_json(capsys):
    given = ["--memory", "80G", "--fsdp", "--offload", "optimizer", "--json"]
    assert main([*FITTED, *given]) == 0
    one, eight, _ = json.loads(capsys.readouterr().out)
    assert eight["tokens"] > one["tokens"]
    assert eight["memory"]["optimizer"] == 0


def test_a_model_by_its_sizes(capsys):
    sizes = ["--heads", "8", "--head-dim", "64", "--layers", "4", "--hidden", "512"]
    more = ["--feed-forward", "2048", "--vocabulary", "32000", "--memory", "16G"]
    assert main(["plan", "--fit", *sizes, *more, "--cp", "2"]) == 0
    assert "published" in capsys.readouterr().out.splitlines()[0]
