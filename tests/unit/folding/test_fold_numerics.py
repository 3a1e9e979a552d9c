"""A folded model computes the same bits; when a graph is compiled folded."""

import pytest
import torch

from cpcompile.compile.compile_folded import SharedResult, check_results, compile_folded
from cpcompile.passes.local.folding.folding_options import Folding
from tests.support.bounds import assert_equal
from tests.support.forms.folded_graphs import folded
from tests.support.forms.repeated_models import LAYERS, Kind, new_model, two_steps

KINDS = {
    "plain": Kind(),
    "tied": Kind(tied=True),
    # Without torch's kernel, whose random state checkpoints keep by an operator.
    "checkpointed": Kind(checkpointed=True, no_softmax=True),
    "writes": Kind(writes=True),
    "rotary": Kind(rotary=True),
    "dropout": Kind(dropout=0.3),
}


def both(kind, layers=LAYERS):
    results, found = [], None
    for fold in (False, True):
        model = new_model(kind, layers)
        found = folded(model, fold)
        results.append(two_steps(found.call, model))
    return *results, found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bits_are_the_same(kind):
    separate, got, found = both(kind)
    # The backward of the first block ends with what embeds the tokens.
    assert found.counts == [[LAYERS], [LAYERS - 1]]
    for name, x in separate.items():
        assert_equal(name, got[name], x)


# Of 7 layers the one in the middle differs. A block may begin within a layer.
ODD = {
    "constant": [[3, 3], [3]],
    "dtype": [[3, 3], [3, 3]],
    "call": [[3, 3], [3, 3]],
    "operand": [[3, 4], [4]],
}


@pytest.mark.parametrize(("odd", "counts"), ODD.items(), ids=ODD)
def test_a_block_that_differs_stays_apart(odd, counts):
    separate, got, found = both(Kind(odd=odd), layers=7)
    assert found.counts == counts
    for name, x in separate.items():
        assert_equal(name, got[name], x)


@pytest.fixture(scope="module")
def graph():
    """The forward graph of a model, before it is folded."""
    model = new_model(Kind())
    found = folded(model, fold=False)
    two_steps(found.call, model)
    return found.modules[0]


class Ranks:
    """Answers of the ranks, in order; keeps what this one has said."""

    def __init__(self, *answers):
        self.answers, self.said = list(answers), []

    def __call__(self, text):
        self.said.append(text)
        return self.answers.pop(0)


def functions(module):
    return [name for name, _ in module.named_children()]


def test_it_is_folded_if_all_ranks_fold_it_so(graph):
    ranks = Ranks(True, True)
    folding = Folding(ranks)
    before = str(graph.graph)
    assert functions(compile_folded(graph, lambda x: x, folding)) == ["block_0"]
    assert [row.count for row in folding.found] == [LAYERS]
    assert ranks.said == [str(folding.found[0]), "compiled"]
    assert str(graph.graph) == before


@pytest.mark.parametrize("answers", [(False,), (True, False)])
def test_no_rank_folds_or_uses_what_another_does_not(graph, answers):
    folding = Folding(Ranks(*answers))
    assert compile_folded(graph, lambda x: x, folding) is graph
    assert folding.found == []


def test_what_cannot_be_compiled_is_compiled_as_it_is(graph, caplog):
    def compiler(module):
        if functions(module):
            raise RuntimeError("no functions, please")
        return module

    ranks = Ranks(True, False)
    with caplog.at_level("DEBUG", "cpcompile"):
        assert compile_folded(graph, compiler, Folding(ranks)) is graph
    assert ranks.said[1] == "not compiled"
    (line,) = [x for x in caplog.messages if "one by one" in x]
    assert "no functions, please" in line


CODE = """
def block_0(args):
    operand_0, operand_1 = args
    args.clear()
    block_0_buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    return ({results}, )

async_compile.wait(globals())
"""


@pytest.mark.parametrize(
    ("results", "shared"),
    [
        ("block_0_buf0, block_0_buf1", False),
        (
            "reinterpret_tensor(block_0_buf0, (4, 2), (2, 1), 0), block_0_buf1",
            False,
        ),
        ("operand_0, block_0_buf0", True),
        ("reinterpret_tensor(operand_1, (4, 2), (2, 1), 0)", True),
        ("block_0_buf0, reinterpret_tensor(block_0_buf0, (4, 2), (2, 1), 8)", True),
    ],
)
def test_results_with_memory_of_their_own(results, shared):
    code = CODE.format(results=results)
    if shared:
        with pytest.raises(SharedResult, match="block_0 returns"):
            check_results(code)
    else:
        assert check_results(code) == 1
    assert check_results("def call(args):\n    return (arg0_1, )\n") == 0


def test_a_length_that_is_a_symbol():
    """Sizes are operands of the functions, and numbers those of separate blocks."""
    values = []
    for fold in (True, False):
        model = new_model(Kind(rotary=True))
        found = folded(model, fold, dynamic=True)
        values.append(two_steps(found.call, model))
        assert [bool(rows) for rows in found.counts] == [fold, fold]
    torch.testing.assert_close(*values, rtol=0, atol=0)
