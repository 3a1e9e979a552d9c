"""The longest sequence that fits, and what takes its memory."""

import json
from dataclasses import fields, replace

import pytest

import cpcompile as cp
from cpcompile.cost.max_sequence.model_memory import (
    LEAST_TOKENS,
    MOST_TILES,
    Decoder,
    Training,
    memory_of,
)
from cpcompile.cost.plain_data import to_dict, to_json
from cpcompile.cost.plans import Candidate, Plan, Strategy, Workload
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.passes.joint.tiling.tile_tokens import _LEAST_TOKENS, _MOST_TILES

LLAMA = Decoder(32, 32, 8, 128, 4096, 14336, 128256)
SMALL = Decoder(2, 4, 2, 16, 64, 96, 211)


def test_parameters_are_those_of_transformers():
    from tests.cpu.model_cases import llama  # slow

    for tied in (False, True):
        model = llama(tie_word_embeddings=tied)
        count = sum(p.numel() for p in model.parameters())
        assert replace(SMALL, tied=tied).parameters == count
    assert LLAMA.parameters == 8_030_261_248  # of Llama-3-8B


def test_what_fits():
    found = cp.fit(LLAMA, memory=80e9, ranks=8, fsdp=True, checkpoint=True)
    assert 0.99 * 80e9 < found.memory.total <= 80e9
    assert found.tokens % 8 == 0 and found.seconds > 0
    found = cp.fit(LLAMA, memory=80e9, ranks=1)
    assert found.tokens == 0 and found.memory.total > 80e9
    assert found.memory.optimizer == 12 * LLAMA.parameters
    how = Training(checkpoint=True)
    one, two = (memory_of(LLAMA, how, 4096, ranks, 0.0) for ranks in (2, 4))
    assert one == two

    def longest(**more):
        given = {"memory": 80e9, "ranks": 8, "fsdp": True, "checkpoint": True}
        return cp.fit(LLAMA, **given | more).tokens

    usual = longest()
    assert longest(checkpoint=False) < usual < longest(tile=True)
    assert (
        usual
        < longest(offload=["optimizer"])
        < longest(offload=["optimizer", "checkpoints"])
    )
    assert usual < longest(memory=141e9) and usual < longest(ranks=16)


def test_what_tiles_and_gradients_take():
    how = Training(tile_bytes=2**31)
    # so many that a step needs the most where the forward ends, not where gradients do
    sizes = [
        memory_of(replace(SMALL, vocabulary=v), how, 2**16, 2, 0.0)
        for v in (8_000, 128_000)
    ]
    assert sizes[0].tiles == sizes[1].tiles
    assert sizes[0].checkpoints == sizes[1].checkpoints
    assert (MOST_TILES, LEAST_TOKENS) == (_MOST_TILES, _LEAST_TOKENS)
    how = Training(tile_bytes=2**20)
    wide = replace(SMALL, vocabulary=128_000)
    one, two = (memory_of(wide, how, n, 2, 0.0).tiles for n in (2**17, 2**18))
    assert one == 2 * 4 * 128_000 * 2**17 / 64 and two == 2 * one
    how = Training(tile_bytes=2**20)
    wide = replace(SMALL, hidden=1024, vocabulary=128_000)
    found = memory_of(wide, how, 4096, 2, 0.0)
    assert found.gradients == 2 * wide.parameters
    assert (
        found.checkpoints
        == memory_of(replace(wide, layers=1), how, 4096, 2, 0.0).checkpoints
    )


def test_what_a_layer_saves():
    def saved(model, exchanged=False):
        more = replace(model, layers=model.layers + 1)
        sizes = (
            memory_of(x, Training(4, 0), 4096, 2, 1e9, exchanged) for x in (model, more)
        )
        one, other = (x.checkpoints for x in sizes)
        return (other - one) / 4096 / 4

    q, kv, numbers = 64, 32, 4 + 2
    usual = 4 * 64 + 2 * q + 2 * kv + 3 * 96 + numbers
    assert saved(SMALL) == usual
    assert saved(SMALL, exchanged=True) == usual + q  # out in two layouts
    assert saved(replace(SMALL, gated=False)) == usual - 96
    assert saved(replace(SMALL, normed=True)) == usual + q + kv


def test_what_is_needed_most():
    how = Training(4, 0, tile_bytes=2**30)
    many_words = replace(SMALL, vocabulary=10**6)
    at_the_loss = memory_of(many_words, how, 4096, 2, 0.0)
    assert at_the_loss.attention == 0 and at_the_loss.tiles == 2**29
    assert at_the_loss.gradients == 4 * many_words.table  # of the head alone
    in_attention = memory_of(SMALL, how, 4096, 2, 1e9)
    assert in_attention.messages == 1e9 and in_attention.attention > 0
    assert in_attention.gradients >= 4 * SMALL.parameters
    how, q, kv, numbers = Training(4, 0), 64, 32, 4096 * 4
    found = memory_of(SMALL, how, 4096, 2, 1e9, exchanged=True)
    assert found.messages == 1e9 - numbers * (q + 2 * kv)
    assert found.attention == numbers * (64 + 2 * q)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"memory": 0}, "memory is 0, ranks 8; needed positive numbers"),
        ({"ranks": 0}, "ranks 0; needed positive"),
        ({"dtype": "int8"}, "dtype is 'int8'; needed one of float64"),
        ({"offload": ["weights"]}, "offload has 'weights'; needed some of parameters"),
    ],
)
def test_bad_input(given, text):
    with pytest.raises(ValueError, match=text):
        cp.fit(SMALL, **{"memory": 1e9, "ranks": 8} | given)


def a_plan(**changes):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "seq": 4096}
    return cp.plan(ranks=4, **(sizes | changes))


def test_a_candidate():
    candidate = Candidate(
        Strategy.HYBRID, CPDegrees(2, 4, "ring"), Layout.FOLD, 1.5, 0.5, 0.25, 10, 20, 4
    )
    assert to_dict(candidate) == {
        "strategy": "hybrid",
        "degrees": {"ulysses": 2, "ring": 4, "inner": "ring"},
        "layout": "fold",
        "seconds": 1.5,
        "exposed_seconds": 0.5,
        "hidden_seconds": 0.25,
        "wire_bytes": 10,
        "peak_extra_bytes": 20,
        "kernels": 4,
        "relayout": False,
        "head_groups": 1,
        "excluded": None,
        "label": "hybrid 4 (ring) in 2 fold",
    }


def test_plans_as_plain_data():
    plan = a_plan()
    record = json.loads(to_json(plan))
    assert set(record) == {f.name for f in fields(Plan)} | {"runner_up", "hardware"}
    assert set(record["workload"]) == {f.name for f in fields(Workload)}
    assert record["candidates"] == [to_dict(c) for c in plan.candidates]
    assert record["chosen"] == record["candidates"][0]
    assert record["workload"]["direction"] == "both"
    assert plan.runner_up is not None
    assert record["runner_up"] == plan.runner_up.label
    plan = a_plan(seq=128, kv_seq=64, layout="auto")
    reasons = {c["excluded"] for c in to_dict(plan)["candidates"]}
    assert "zigzag needs as many queries as keys" in reasons
    with pytest.raises(TypeError, match="object has no form in JSON"):
        to_dict([object()])
