"""What `cpcompile plan` prints of layers that are no softmax attention."""

import json

import pytest

import cpcompile as cp
from cpcompile.apps.cli.main import main
from cpcompile.cost.plain_data import to_dict

QWEN = ("plan", "--model", "qwen3.5", "--seq", "64k")
KDA = ("--mixer", "kda", "--mixer-value-heads", "32", "--mixer-value-dim", "128")


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of the command in this process."""
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def planned(**changes):
    sizes = {"kind": "gated_delta_rule", "seq": 2**16, "ranks": 8}
    return cp.plan_mixer(**(sizes | {"value_heads": 32, "value_dim": 128} | changes))


def attention(ranks):
    """Of qwen3.5; mixers have tokens in natural order, which costs relayouts."""
    return cp.plan(
        batch=1, heads=16, kv_heads=4, head_dim=256, seq=2**16, ranks=ranks,
        relayout=True,
    )  # fmt: skip


def test_a_hybrid_prints_both_and_their_sum(capsys):
    code, out, err = run(capsys, *QWEN, "--cp", "8")
    assert (code, err) == (0, "")
    first, _, second = out.partition("\n24 layers of ")
    assert first.startswith("qwen3.5, 8 layers: 65536 tokens, ")
    plan = planned()
    assert second.startswith("gated_delta_rule: 65536 tokens, batch 1, 32 key heads")
    assert plan.decision_text(24) in second
    assert plan.table() in second
    total = 8 * attention(8).chosen.seconds + 24 * plan.chosen.seconds
    assert out.splitlines()[-1] == f"all 32 layers: {1e3 * total:.3f} ms"


def test_a_sweep_of_a_hybrid_is_a_second_table(capsys):
    code, out, _ = run(capsys, *QWEN, "--cp", "8..64", "--mixer-work", "chunks")
    assert code == 0
    header, *rows = out.splitlines()[-5:]
    assert " ".join(header.split()) == (
        "ranks chosen ms/layer wire MB runner-up ms of all"
    )
    for row, ranks in zip(rows, (8, 16, 32, 64), strict=True):
        plan = planned(ranks=ranks, work="chunks")
        total = 8 * attention(ranks).chosen.seconds + 24 * plan.chosen.seconds
        assert row.split()[:2] == [str(ranks), plan.strategy.value]
        assert plan.runner_up_text() in row
        assert row.split()[-1] == f"{1e3 * total:.3f}"
    _, out, _ = run(capsys, *QWEN, "--cp", "8,16", "--candidates")
    assert out.count("excluded because") == 4


def test_a_sweep_has_no_sum_where_attention_has_no_plan(capsys):
    budget = ("--memory-budget", "64MiB")
    code, out, _ = run(capsys, *QWEN, "--cp", "2,256", *budget)
    assert code == 0 and "none: every strategy" in out
    *_, two, many = out.splitlines()
    assert not two.split()[-1].replace(".", "").isdigit()
    assert many.split()[-1].replace(".", "").isdigit()


def test_json_has_both(capsys):
    _, out, _ = run(capsys, *QWEN, "--cp", "8", "--json")
    assert json.loads(out) == json.loads(
        json.dumps({"attention": to_dict(attention(8)), "mixer": to_dict(planned())})
    )
    _, out, _ = run(capsys, *QWEN, "--cp", "8,16", "--json")
    both = json.loads(out)
    assert [x["ranks"] for x in both["mixer"]] == [8, 16]
    assert [x["workload"]["ranks"] for x in both["attention"]] == [8, 16]


def test_a_mixer_without_attention(capsys):
    call = ("plan", *KDA, "--seq", "8k", "--cp", "4", "--direction", "forward")
    plan = planned(kind="kda", seq=8192, ranks=4, direction="forward")
    _, out, _ = run(capsys, *call)
    assert out == f"{plan}\n"
    _, out, _ = run(capsys, *call, "--json")
    assert json.loads(out) == json.loads(json.dumps(to_dict(plan)))
    _, out, _ = run(capsys, *call, "--cp", "2,4", "--json")
    assert [x["ranks"] for x in json.loads(out)] == [2, 4]


def test_sizes_beside_a_model_replace_its_own(capsys):
    sizes = ("--mixer-key-heads", "16", "--mixer-layers", "3")
    _, out, _ = run(capsys, *QWEN, "--cp", "8", *sizes)
    assert "\n3 layers of gated_delta_rule: " in out
    assert "16 key heads of 128, 32 value heads" in out
    _, out, _ = run(capsys, *QWEN, "--cp", "8", "--mixer", "kda", "--json")
    assert json.loads(out)["mixer"]["name"] == "kda"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mixer", "kda"), "--mixer needs --mixer-value-heads and --mixer-value-dim"),
        (("--model", "gpt2", "--mixer-key-dim", "8"),
         "sizes of a mixer need --mixer, such as gated_delta_rule"),
        ((*KDA, "--mixer-key-heads", "5"),
         "value_heads is 32; needed a multiple of key_heads, which is 5"),
        ((*KDA, "--fit"), "--fit and --plot are for attention; needed --model, or "
         "--heads and --head-dim, beside --mixer"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, arguments, message):
    code, out, err = run(capsys, "plan", *arguments, "--seq", "8k", "--cp", "2")
    assert (code, out, err) == (2, "", f"cpcompile plan: {message}\n")


def test_an_unknown_kind_is_one_line(capsys):
    code, _, err = run(capsys, "plan", "--mixer", "rwkv", "--seq", "8k", "--cp", "2")
    assert code == 2 and err.count("\n") == 1
    assert "invalid choice: 'rwkv'" in err and "gated_delta_rule" in err
