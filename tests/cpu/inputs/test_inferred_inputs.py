"""Programs without annotations: as right, and as sharded, as annotated ones."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from cpcompile import logs
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import build, check_model, loss_and_logits, results
from tests.cpu.one_call import Model, message_of, tokens
from tests.cpu.programs import PROGRAMS
from tests.support.bounds import (
    Deviation,
    check,
    deviation,
    deviations,
    in_one_process,
    step,
)


def step_of(model, world: int = 2, **options):
    torch._dynamo.reset()
    given = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    return torch.compile(model, backend="cp", options=given | options)


def run_program(name: str, seq: int, world: int) -> dict[str, object]:
    """A program of test_programs with a batch as large as the sequence is long."""
    torch.manual_seed(0)
    model = PROGRAMS[name]()
    ids = torch.randint(0, 50, (seq, seq))
    values = in_one_process(lambda alone: step(alone, alone, ids), model)
    compiled = step_of(model, world)
    with recording() as reports:
        got = step(compiled, model, ids)
    return {
        "deviations": deviations(got, *values),
        "inputs": [list(map(str, r.inputs)) for r in reports],
        "distributed": [r.distributed_calls for r in reports],
    }


def distributed_calls(name: str, seq: int, world: int) -> list[int]:
    """How many calls run on DTensors where the input is named."""
    torch.manual_seed(0)
    compiled = step_of(PROGRAMS[name](), world, shard={"tokens": 1})
    with recording() as reports:
        compiled(torch.randint(0, 50, (seq, seq)))
    return [r.distributed_calls for r in reports]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize(
    "name", ["Base", "Losses", "ModuleEncoder", "ClassToken", "Autocast", "OneKeyHead"]
)
def test_a_program_equals_one_process(pools, name, seq, world):
    named = pools[world].run(distributed_calls, name, seq, world, timeout=60)
    runs = pools[world].run(run_program, name, seq, world, timeout=90)
    for run, annotated in zip(runs, named, strict=True):
        check(run["deviations"])
        assert run["inputs"] == [["tokens dim 1 (inferred)"]]
        assert run["distributed"] == annotated


def run_breaks() -> dict[str, object]:
    return run_program("Breaks", 16, 2)


def test_after_a_graph_break_values_are_cut_at_once(pools):
    for run in pools[2].run(run_breaks):
        check(run["deviations"])
        assert run["inputs"] == [["tokens dim 1 (inferred)"], ["x dim 1 (inferred)"]]


def run_model(name: str, seq: int, world: int) -> dict[str, object]:
    model, inputs = build(name, seq)
    compiled = step_of(model, world)
    with recording() as reports:
        loss, logits = loss_and_logits(compiled(**inputs))
    loss.backward()
    return {
        "values": results(model, loss, logits),
        "inputs": {str(x) for r in reports for x in r.inputs},
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("seq", "world"), [(64, 2), (37, 3)])
@pytest.mark.parametrize("name", ["small_gpt", "checkpoint_all", "llama"])
def test_whole_models(pools, name, seq, world):
    """Of the small GPT the width is 64, too."""
    ids = "input_ids" if name == "llama" else "tokens"
    for rank, run in enumerate(
        pools[world].run(run_model, name, seq, world, timeout=150)
    ):
        check_model(name, seq, run["values"], rank)
        assert run["inputs"] == {f"{ids} dim 1 (inferred)", "labels dim 1 (inferred)"}


def run_lengths(dynamic: bool | None) -> tuple[list[int], list[Deviation]]:
    """Number of the program of every length, and deviations of the loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PROGRAMS["Base"]()
    compiled = torch.compile(
        model,
        backend="cp",
        options={"mesh": sequence_mesh(2), "inner": "aot_eager"},
        dynamic=dynamic,
    )
    programs, numbers, found = [], [], []
    for seq in (64, 48, 96, 37):
        ids = torch.randint(0, 50, (2, seq))
        with recording() as reports:
            loss = compiled(ids)
        if reports[0] not in programs:
            programs.append(reports[0])
        numbers.append(programs.index(reports[0]))
        assert [str(x) for x in reports[0].inputs] == ["tokens dim 1 (inferred)"]
        values = in_one_process(lambda alone, ids=ids: {"loss": alone(ids)}, model)
        found += deviations({"loss": loss}, *values)
    return numbers, found


def test_a_length_may_be_a_symbol(pools):
    for numbers, found in pools[2].run(run_lengths, True, timeout=90):
        assert numbers == [0, 0, 0, 1]
        check(found)


class WithLabels(Model):
    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


def other_labels() -> str:
    """Labels are plain, and would be mixed all the same."""
    compiled = step_of(WithLabels())
    return message_of(lambda: compiled(tokens(), (tokens() + dist.get_rank()) % 32))


def test_ranks_with_different_labels(pools):
    first, second = pools[2].run(other_labels)
    assert first == second
    assert "RankMismatchError" in first and "values of labels: rank 0 has" in first
    assert "values of tokens" not in first


class Rows(nn.Module):
    """Attention over the rows of a table, and then over its columns."""

    def forward(self, table):
        x = F.scaled_dot_product_attention(table, table, table)
        x = x.transpose(0, 1)
        return F.scaled_dot_product_attention(x, x, x).sum()


def read_twice() -> str:
    compiled = step_of(Rows())
    return message_of(lambda: compiled(torch.randn(6, 6, 8)))


def chosen() -> list[Deviation]:
    """Of a sum of 288 random numbers, whose parts are about 17."""
    table, rows = torch.randn(6, 6, 8), Rows()
    loss = step_of(rows, shard={"table": 0})(table)
    return [deviation("loss", loss, rows(table.double()), rows(table), floor=17.0)]


def test_two_readings_are_the_users_to_choose(pools):
    for text in pools[2].run(read_twice):
        assert "InputError: the attention calls of forward read different" in text
        assert '"shard": {"table": 0}}' in text and '"shard": {"table": 1}}' in text
    for found in pools[2].run(chosen):
        check(found)


class Constant(nn.Module):
    """Queries are parameters, and values come of a scan: no input has the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4, 6, 8))

    def forward(self, x):
        v = x.cummax(2)[0]
        return F.scaled_dot_product_attention(self.queries, self.queries, v).sum()


def warnings_of_constant() -> tuple[list[str], Deviation]:
    logs.warn_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("cpcompile").addHandler(handler)
    try:
        model = Constant()
        x = torch.randn(2, 4, 6, 8)
        exact, rough = copy.deepcopy(model).double()(x.double()), model(x)
        loss = step_of(model)(
            x
        )  # of 384 random numbers, whose parts are as large as 20
        return messages, deviation("loss", loss, exact, rough, floor=20.0)
    finally:
        logging.getLogger("cpcompile").removeHandler(handler)


def test_a_warning_where_nothing_can_be_inferred(pools):
    for messages, found in pools[2].run(warnings_of_constant):
        (text,) = [x for x in messages if "no input could be inferred" in x]
        assert "only these are shared out" in text
        check([found])
