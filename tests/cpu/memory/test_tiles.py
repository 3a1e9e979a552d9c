"""What runs tile by tile on several ranks equals one process, and is said."""

import pytest
import torch
import torch.distributed as dist

from cpcompile import config
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.model_cases import FLOOR, build, check_model, reference, run_model
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of
from tests.support.bounds import check, deviation, largest

SEQ = 64
EAGER = {"inner": "aot_eager"}


def run_tiled(name, world, door, options, least=1e-3, seq=SEQ):
    warn_once.cache_clear()
    tiled = config.patch(tile_least_megabytes=least)
    with tiled, warnings() as texts, recording() as reports:
        run = run_model(name, seq, world, door, options)
    run["warnings"] = texts
    run["tiles"] = [tile for report in reports for tile in report.tiles]
    lines = [line for report in reports for line in report.edges()]
    run["lines"] = [line for line in lines if "in tiles" in line]
    run["all_lines"], run["reports"] = lines, reports
    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "world", "door", "inner", "tile"),
    [
        ("llama", 2, "plain", "inductor", 8),
        ("llama", 2, "dtensor", "aot_eager", 8),
        ("llama", 4, "plain", "aot_eager", 3),
        ("small_gpt", 3, "plain", "aot_eager", 5),
        ("small_gpt", 2, "plain", "inductor", 8),
        ("checkpoint_all", 2, "plain", "aot_eager", 8),
        ("checkpoint_all", 2, "plain", "inductor", 8),
        ("gpt2", 2, "plain", "aot_eager", 8),
    ],
)
@on_ranks("world", timeout=240)
def test_training_step(name, world, door, inner, tile):
    run = run_tiled(name, world, door, {"inner": inner, "tile": tile})
    check_model(name, SEQ, run["values"], dist.get_rank())
    assert {x.tile for x in run["tiles"]} == {tile}, run["tiles"]
    assert run["lines"] == [f"in tiles: {x}" for x in run["tiles"]]


@pytest.mark.parametrize("tile", [None, 0])
@on_ranks(2)
def test_what_is_small_or_not_asked_for_is_left(tile):
    least = 16.0 if tile is None else 1e-3
    run = run_tiled("llama", 2, "plain", EAGER | {"tile": tile}, least)
    check_model("llama", SEQ, run["values"], dist.get_rank())
    assert run["tiles"] == []


@on_ranks(2)
def test_ranks_may_cut_differently():
    """Of 65 tokens one rank has 33, and cuts them, and the other has 32."""
    run = run_tiled("small_gpt", 2, "plain", EAGER | {"tile": 32}, 1e-3, 65)
    check_model("small_gpt", 65, run["values"], dist.get_rank())
    own = [x for x in run["tiles"] if x.tokens < 65]  # a table by position has all
    assert bool(own) == (dist.get_rank() == 0)


LONG = 256


@on_ranks(2)
def test_auto_leaves_logits_that_are_returned():
    with config.patch(tile_megabytes=0.02):
        run = run_tiled("llama", 2, "plain", EAGER, seq=LONG)
    check_model("llama", LONG, run["values"], dist.get_rank())
    assert run["tiles"] == []
    assert any("beside the loss" in x for x in run["warnings"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@on_ranks(2, timeout=240)
def test_results_that_are_not_named_are_not_made(inner):
    exact, rough = (reference("llama", LONG, x) for x in (torch.float64, torch.float32))
    del exact["logits"], rough["logits"]
    model, inputs = build("llama", LONG)
    how = {"inner": inner, "shard": dict.fromkeys(inputs, 1)}
    least = {"tile_least_megabytes": 1e-3, "tile_megabytes": 0.02}
    with config.patch(outputs=["los"]):
        text = message_of(lambda: compiled_on(2, model, **how)(**inputs))
    assert "config.outputs: got 'los'; needed names of results:" in text
    assert "'loss', 'logits'" in text
    torch._dynamo.reset()
    with config.patch(outputs=["loss"], **least), recording() as reports:
        result = compiled_on(2, model, **how)(**inputs)
        result.loss.backward()
    values = {"loss": result.loss.detach()}
    values |= {n: p.grad for n, p in model.named_parameters()}
    floor = FLOOR * max(largest(x) for n, x in exact.items() if n != "loss")
    check([deviation(n, values[n], x, rough[n], floor) for n, x in exact.items()])
    assert result.logits is None and not any(x.gathered for x in reports)
    assert [x.gradients_at_once for r in reports for x in r.tiles] == [True]


@pytest.mark.parametrize(("limit", "kind"), [(1 / 8, "Tensor"), (1 / 16, "DTensor")])
@on_ranks(2)
def test_results_are_gathered_up_to_a_limit(limit, kind):
    # logits [2, 64, 211] in float32 have 108,032 bytes
    options = EAGER | {"gather_outputs_megabytes": limit}
    run = run_tiled("small_gpt", 2, "plain", options)
    check_model("small_gpt", SEQ, run["values"], dist.get_rank())
    assert run["result_types"] == ("Tensor", kind)
    warned = [x for x in run["warnings"] if "it stays sharded" in x]
    assert len(warned) == (kind == "DTensor")


@on_ranks(2)
def test_tiles_that_were_asked_for_and_are_none_are_named():
    run = run_tiled("small_gpt", 2, "plain", EAGER | {"tile": 7}, 16.0)
    assert any("nothing runs in tiles" in x for x in run["warnings"])
