"""The sweep of torch's samples: which of them count, what is kept, what runs again."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.models.operator_samples import (
    CutSample,
    SampleAnswer,
    SampleProgram,
    SampleVerdict,
    differences,
    joined,
    values_of,
)
from tools.models.operators import (
    as_row,
    recorded,
    remaining,
)


def program(input, *args, function=torch.add, **kwargs):
    sample = SimpleNamespace(input=input, args=args, kwargs=kwargs)
    return SampleProgram(function, sample)


def test_samples_and_cuts():
    x, index = torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)
    tensors = program([x, index, x], slice(None, 2), (1,), dim=-1, value=float("inf"))
    assert tensors.call == (
        "op([x0, x1, x0], slice(None, 2, None), (1,), dim=-1, value=float('inf'))"
    )
    assert tensors.source((("x0", 1),)).splitlines() == [
        "def forward(x0, x1):",
        "    x0 = x0 * 1",
        f"    return {tensors.call}",
    ]
    flags = program(torch.ones(2, dtype=torch.bool))
    assert "x0 = x0.clone()" in flags.source((("x0", 0),))
    x, y, scalar = torch.ones(2, 1), torch.ones(2, 1), torch.ones(())
    assert list(program(x, y, scalar).cuts()) == [
        (("x0", 0), ("x1", 0)),
        (("x0", 0),),
        (("x1", 0),),
    ]
    assert list(program(x, torch.ones(3)).cuts()) == [(("x0", 0),), (("x1", 0),)]
    assert list(program(scalar).cuts()) == []


@pytest.mark.parametrize(
    ("shape", "alike"),
    [((5, 3), True), ((7, 5), True), ((4, 3), False), ((3, 3), False), ((5, 1), False)],
)
def test_sizes_of_one_kind_count_once(shape, alike):
    first = program(torch.ones(5, 3), dim=1).signature()
    assert (program(torch.ones(shape), dim=1).signature() == first) is alike


def test_results_and_gradients_are_compared():
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    roots = program(x, function=torch.sqrt)
    forward = roots.forward((("x0", 0),))
    values = values_of(forward, roots.tensors)
    assert set(values) == {"result 0", "grad of x0"}
    assert differences(values, values, dict) == []  # NaN where NaN is
    other = {**values, "result 0": values["result 0"] + 1e-9}
    assert differences(other, values, dict) == ["result 0 differs by 1e-09 of 1"]
    assert differences({}, {"result 0": x, "grad of x0": x * 0}, dict) == [
        "result 0 is missing"
    ]
    whole = values["result 0"]
    assert differences({"a": whole}, {"a": whole.float()}, dict) == [
        "a is torch.float64[2], not torch.float32[2]"
    ]
    defined = {"a": whole.nan_to_num(0.0)}
    assert differences(defined, {"a": whole}, dict) == ["a differs by inf of 1"]
    rounded = {"a": torch.full((2,), 1 + 1e-9, dtype=torch.float64)}
    one = {"a": torch.ones(2, dtype=torch.float64)}
    assert differences(rounded, one, lambda: rounded) == []


def answer(verdict, text="", seconds=0.0):
    return SampleAnswer(SampleVerdict(verdict), text, seconds, "op(x0)")


def test_the_worst_rank_counts_and_ranks_that_differ_are_a_crash():
    assert joined([answer("exact"), answer("wrong", "a")]).text == "a"
    refused = joined([answer("refused", "no"), answer("refused", "no", 2.0)])
    assert (refused.verdict, refused.seconds) == (SampleVerdict.REFUSED, 2.0)
    alone = joined([answer("refused", "no"), answer("exact")])
    assert alone.verdict is SampleVerdict.CRASH


CASES = [CutSample("abs", "float64", n, (("x0", 0),)) for n in range(3)]


def test_a_run_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "work.jsonl"
    assert recorded(path) == {}
    lines = [
        json.dumps(as_row(CASES[0], answer("wrong", "first"))),
        json.dumps(as_row(CASES[0], answer("refused", "later"))),
        json.dumps(as_row(CASES[1], answer("exact"))),
        '{"case": "abs/fl',
    ]
    path.write_text("\n".join(lines))
    rows = recorded(path)
    assert [row["verdict"] for row in rows.values()] == ["refused", "exact"]
    assert remaining(CASES, rows, None) == CASES[2:]
    assert remaining(CASES, rows, []) == CASES
    assert remaining(CASES, rows, ["refused", "wrong"]) == CASES[:1]
