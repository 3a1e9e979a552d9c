"""All passes together: every rank sends the same, and every pass is counted."""

import re
from math import inf

import pytest
import torch
from torch._dynamo.utils import counters

import cpcompile as cp
from cpcompile.passes.pipeline import JOINT, MODEL, WHOLE
from tests.golden.capture import RANKS, fake_mesh, forget, localised
from tests.models.families.small_gpt import SmallGPT


def small_gpt():
    torch.manual_seed(0)
    return SmallGPT(vocabulary=16, width=8, heads=2, context=64, checkpointed=(1,))


def messages(rank, tokens, form, **options):
    """The calls of one rank that communicate, and how many tokens that rank holds."""
    with fake_mesh(RANKS, rank=rank) as mesh:
        ids = torch.arange(2 * tokens).reshape(2, tokens) % 16
        part = cp.shard(ids, mesh, 1)
        inputs = (part, part)
        if form == "plain inputs":
            inputs = (ids, ids.clone())
            options |= {"mesh": mesh, "shard": {"tokens": 1, "labels": 1}}
        text = localised(small_gpt(), *inputs, strategy="ring", **options).text
        calls = re.findall(r" = ((?:cp|_c10d_functional)\.\w+)\(", text)
        return calls, part.to_local().shape[1]


@pytest.mark.parametrize("form", ["plain inputs", "sharded inputs"])
@pytest.mark.parametrize(("tokens", "megabytes"), [(32, inf), (30, 0), (5, inf)])
def test_first_and_last_rank_send_the_same(form, tokens, megabytes):
    """Also where the last rank holds fewer tokens, or none."""
    options = {"gather_outputs_megabytes": megabytes}
    first, first_tokens = messages(0, tokens, form, **options)
    last, last_tokens = messages(RANKS - 1, tokens, form, **options)
    assert (first_tokens == last_tokens) == (tokens % RANKS == 0)
    assert first.count("cp.ring_attention") == 2
    assert first == last


def test_two_runs_write_the_same_graph(mesh):
    ids = torch.zeros(2, 16, dtype=torch.long)
    texts = []
    for _ in range(2):
        forget()
        texts.append(localised(small_gpt(), ids, mesh=mesh, shard={"tokens": 1}).text)
    assert texts[0] == texts[1]


def test_every_pass_is_counted(mesh):
    counters.clear()
    ids = torch.zeros(2, 16, dtype=torch.long)
    options = {"mesh": mesh, "shard": {"tokens": 1}, "inner": "aot_eager"}
    options |= {"strategy": "ring", "layout": "zigzag"}
    compiled = torch.compile(small_gpt(), backend="cp", options=options)
    (graph,) = cp.explain(compiled, ids).graphs
    names = [run.__name__ for run in MODEL]
    assert [run.name for run in graph.passes] == names
    counts = dict(counters["cpcompile"])
    assert counts.pop("localise") > graph.distributed_calls > 20
    others = {run.__name__ for run in (*WHOLE, *JOINT)} - {"localise"}
    moves = {"relayouts_left", "relayouts_cancelled"}
    assert counts.keys() == {*names, *others, *moves}
    assert {name: count for name, count in counts.items() if count} == {
        "find_attention": 2,
        "choose_strategy": 2,
        "insert_attention": 2,
        "keep_products": 27,
        "relayouts_cancelled": 8,
        "sink_slices": 4,
    }
    assert {run.name: run.rewrites for run in graph.passes}.items() <= counts.items()


def flat(x):
    """DTensor cannot flatten 13 tokens on 8 ranks in this order."""
    return x.transpose(0, 1).reshape(-1, 8).relu()


def text_of_plain_inputs(mesh):
    x = torch.randn(2, 13, 8)
    return localised(lambda x: flat(x), x, mesh=mesh, shard={"x": 1}).text


def test_answers_are_forgotten_when_the_backend_is_called(mesh):
    alone = text_of_plain_inputs(mesh)
    assert alone.count("all_gather_into_tensor(") == 1
    forget()
    sharded = localised(lambda x: flat(x), cp.shard(torch.randn(2, 13, 8), mesh, 1))
    assert sharded.text.count("all_gather_into_tensor(") == 1
    assert text_of_plain_inputs(mesh) == alone
