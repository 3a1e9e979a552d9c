"""Programs without annotations: as right, and as sharded, as annotated ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.against_one_process import Comparison, compare, compare_calls
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import Model, message_of, tokens
from tests.cpu.programs import PROGRAMS


def compared(name: str, seq: int, world: int, **options) -> Comparison:
    torch.manual_seed(0)
    model = PROGRAMS[name]().double()
    ids = torch.randint(0, 50, (seq, seq))  # a batch as large as the sequence is long
    found = compare_calls(model, [(ids,)], world, **options)
    found.check()
    return found


@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize(
    "name", ["Base", "Losses", "ModuleEncoder", "ClassToken", "Autocast"]
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
    compiled = compiled_on(2, WithLabels())
    labels = (tokens() + dist.get_rank()) % 32
    text = message_of(lambda: compiled(tokens(), labels))
    assert "RankMismatchError" in text and "values of labels: rank 0 has" in text
    assert "values of tokens" not in text


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
