"""`cpcompile plan --fit`."""

import json

from cpcompile.apps.cli.main import main

LLAMA = ["plan", "--fit", "--model", "llama3-8b", "--gpus", "1,8,32"]


def test_published_figures_stand_beside(capsys):
    assert main([*LLAMA, "--memory", "80G", "--fsdp", "--checkpoint", "--tile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoints" in lines[0] and "s per step" in lines[0]
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert "none" in rows["1"] and "500,000" in rows["1"]
    assert "3,700,000 a, 5,000,000 b" in rows["8"] and "15,000,000 a" in rows["32"]
    assert any("Arctic Long Sequence Training" in x for x in lines)


def test_no_figures_for_another_machine(capsys):
    assert main([*LLAMA, "--memory", "141G", "--fsdp", "--checkpoint"]) == 0
    assert "15,000,000" not in capsys.readouterr().out


def test_json(capsys):
    given = ["--memory", "80G", "--fsdp", "--offload", "optimizer", "--json"]
    assert main([*LLAMA, *given]) == 0
    one, eight, _ = json.loads(capsys.readouterr().out)
    assert eight["tokens"] > one["tokens"]
    assert eight["memory"]["optimizer"] == 0


def test_a_model_by_its_sizes(capsys):
    sizes = ["--heads", "8", "--head-dim", "64", "--layers", "4", "--hidden", "512"]
    more = ["--feed-forward", "2048", "--vocabulary", "32000", "--memory", "16G"]
    assert main(["plan", "--fit", *sizes, *more, "--cp", "2"]) == 0
    assert "published" in capsys.readouterr().out.splitlines()[0]
