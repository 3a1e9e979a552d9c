"""Programs without annotations: as right, and as sharded, as annotated ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare, compare_calls
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import build, check_model, loss_and_logits, results
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import Model, message_of, tokens
from tests.cpu.programs import PROGRAMS


def step_of(model, world: int = 2, **options):
    torch._dynamo.reset()
    given = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    return torch.compile(model, backend="cp", options=given | options)


def ids_of(seq: int) -> torch.Tensor:
    """With a batch as large as the sequence is long."""
    return torch.randint(0, 50, (seq, seq))


def compared(name: str, seq: int, world: int, **options) -> Comparison:
    torch.manual_seed(0)
    model = PROGRAMS[name]().double()
    found = compare_calls(model, [(ids_of(seq),)], world, **options)
    found.check()
    return found


@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize(
    "name", ["Base", "Losses", "ModuleEncoder", "ClassToken", "Autocast", "OneKeyHead"]
)
@on_ranks("world")
def test_a_program_equals_one_process(name, seq, world):
    """As many calls run on DTensors as where the input is named."""
    inferred = compared(name, seq, world)
    named = compared(name, seq, world, shard={"tokens": 1})
    (report,), (annotated,) = inferred.reports, named.reports
    assert [str(x) for x in report.inputs] == ["tokens dim 1 (inferred)"]
    assert report.distributed_calls == annotated.distributed_calls


@on_ranks(2)
def test_after_a_graph_break_values_are_cut_at_once():
    inputs = [str(x) for r in compared("Breaks", 16, 2).reports for x in r.inputs]
    assert inputs == ["tokens dim 1 (inferred)", "x dim 1 (inferred)"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("seq", "world"), [(64, 2), (37, 3)])
@pytest.mark.parametrize("name", ["small_gpt", "checkpoint_all", "llama"])
@on_ranks("world")
def test_whole_models(name, seq, world):
    """Of the small GPT the width is 64, too."""
    ids = "input_ids" if name == "llama" else "tokens"
    model, inputs = build(name, seq)
    compiled = step_of(model, world)
    with recording() as reports:
        loss, logits = loss_and_logits(compiled(**inputs))
    loss.backward()
    check_model(name, seq, results(model, loss, logits), dist.get_rank())
    found = {str(x) for r in reports for x in r.inputs}
    assert found == {f"{ids} dim 1 (inferred)", "labels dim 1 (inferred)"}


@on_ranks(2)
def test_a_length_may_be_a_symbol():
    calls = [(torch.randint(0, 50, (2, seq)),) for seq in (64, 48, 96, 37)]
    found = compare_calls(PROGRAMS["Base"]().double(), calls, 2, dynamic=True)
    found.check()
    first, *others, last = found.reports
    assert all(x is first for x in others) and last is not first
    for report in found.reports:
        assert [str(x) for x in report.inputs] == ["tokens dim 1 (inferred)"]


class WithLabels(Model):
    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


@on_ranks(2)
def test_ranks_with_different_labels():
    """Labels are plain, and would be mixed all the same."""
    compiled = step_of(WithLabels())
    labels = (tokens() + dist.get_rank()) % 32
    text = message_of(lambda: compiled(tokens(), labels))
    assert "RankMismatchError" in text and "values of labels: rank 0 has" in text
    assert "values of tokens" not in text


class Rows(nn.Module):
    """Attention over the rows of a table, and then over its columns."""

    def forward(self, table):
        x = F.scaled_dot_product_attention(table, table, table)
        x = x.transpose(0, 1)
        return F.scaled_dot_product_attention(x, x, x).sum()


@on_ranks(2)
def test_two_readings_are_the_users_to_choose():
    compiled = step_of(Rows())
    text = message_of(lambda: compiled(torch.randn(6, 6, 8)))
    assert "InputError: the attention calls of forward read different" in text
    assert '"shard": {"table": 0}}' in text and '"shard": {"table": 1}}' in text
    calls = [(torch.randn(6, 6, 8, dtype=torch.float64),)]
    compare_calls(Rows(), calls, 2, shard={"table": 0}).check()


class Constant(nn.Module):
    """Queries are parameters, and values come of a scan: no input has the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4, 6, 8))

    def forward(self, x):
        v = x.cummax(2)[0]
        return F.scaled_dot_product_attention(self.queries, self.queries, v).sum()


@on_ranks(2)
def test_a_warning_where_nothing_can_be_inferred():
    found = compare(Constant, (2, 4, 6, 8), 2)
    found.check()
    (text,) = [x for x in found.warnings if "no input could be inferred" in x]
    assert "only these are shared out" in text
