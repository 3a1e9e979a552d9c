"""What runs tile by tile on several ranks equals one process, and is said."""

import logging

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile import config
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import FLOOR, build, check_model, reference, run_model
from tests.support.bounds import check, deviation, largest

SEQ = 64


def run_tiled(name, world, door, options, least=1e-3, seq=SEQ):
    warn_once.cache_clear()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("cpcompile")
    log.addHandler(handler)
    with config.patch(tile_least_megabytes=least), recording() as reports:
        run = run_model(name, seq, world, door, options)
    log.removeHandler(handler)
    run["warnings"] = records
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
def test_training_step(pools, name, world, door, inner, tile):
    call = (name, world, door, {"inner": inner, "tile": tile})
    for rank, run in enumerate(pools[world].run(run_tiled, *call, timeout=240)):
        check_model(name, SEQ, run["values"], rank)
        assert {x.tile for x in run["tiles"]} == {tile}, run["tiles"]
        assert run["lines"] == [f"in tiles: {x}" for x in run["tiles"]]


@pytest.mark.parametrize("tile", [None, 0])
def test_what_is_small_or_not_asked_for_is_left(pools, tile):
    call = ("llama", 2, "plain", {"inner": "aot_eager", "tile": tile})
    least = 16.0 if tile is None else 1e-3
    for rank, run in enumerate(pools[2].run(run_tiled, *call, least, timeout=240)):
        check_model("llama", SEQ, run["values"], rank)
        assert run["tiles"] == []


def test_ranks_may_cut_differently(pools):
    """Of 65 tokens one rank has 33, and cuts them, and the other has 32."""
    call = ("small_gpt", 2, "plain", {"inner": "aot_eager", "tile": 32}, 1e-3, 65)
    runs = pools[2].run(run_tiled, *call, timeout=240)
    for rank, run in enumerate(runs):
        check_model("small_gpt", 65, run["values"], rank)
        assert bool(run["tiles"]) == (rank == 0)


LONG = 256


def run_auto():
    with config.patch(tile_megabytes=0.02):
        return run_tiled("llama", 2, "plain", {"inner": "aot_eager"}, seq=LONG)


def test_auto_leaves_logits_that_are_returned(pools):
    for rank, run in enumerate(pools[2].run(run_auto, timeout=240)):
        check_model("llama", LONG, run["values"], rank)
        assert run["tiles"] == []
        assert any("beside the loss" in x for x in run["warnings"])


def run_for_the_loss(inner, outputs):
    torch._dynamo.reset()
    model, inputs = build("llama", LONG)
    options = {
        "mesh": sequence_mesh(2),
        "shard": dict.fromkeys(inputs, 1),
        "inner": inner,
    }
    settings = config.patch(
        tile_least_megabytes=1e-3, tile_megabytes=0.02, outputs=outputs
    )
    with settings, recording() as reports:
        result = torch.compile(model, backend="cp", options=options)(**inputs)
        result.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    tiles = [tile for report in reports for tile in report.tiles]
    gathered = [x for report in reports for x in report.gathered]
    return {"loss": result.loss.detach()} | found, result.logits, tiles, gathered


@pytest.mark.timeout(300)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_results_that_are_not_named_are_not_made(pools, inner):
    exact, rough = (reference("llama", LONG, x) for x in (torch.float64, torch.float32))
    del exact["logits"], rough["logits"]
    runs = pools[2].run(run_for_the_loss, inner, ["loss"], timeout=240)
    for values, logits, tiles, gathered in runs:
        floor = FLOOR * max(largest(x) for n, x in exact.items() if n != "loss")
        check([deviation(n, values[n], x, rough[n], floor) for n, x in exact.items()])
        assert logits is None and gathered == []
        assert [x.gradients_at_once for x in tiles] == [True]


def run_unknown_name():
    try:
        run_for_the_loss("aot_eager", ["los"])
    except BackendCompilerFailed as error:
        return str(error).split("\n\n")[0]
    return ""


def test_an_unknown_name_lists_what_there_is(pools):
    for message in pools[2].run(run_unknown_name, timeout=240):
        assert "config.outputs: got 'los'; needed names of results:" in message
        assert "'loss', 'logits'" in message


@pytest.mark.parametrize(("limit", "kind"), [(1 / 8, "Tensor"), (1 / 16, "DTensor")])
def test_results_are_gathered_up_to_a_limit(pools, limit, kind):
    # logits [2, 64, 211] in float32 have 108,032 bytes
    options = {"inner": "aot_eager", "gather_outputs_megabytes": limit}
    call = ("small_gpt", 2, "plain", options)
    for rank, run in enumerate(pools[2].run(run_tiled, *call, timeout=240)):
        check_model("small_gpt", SEQ, run["values"], rank)
        assert run["result_types"] == ("Tensor", kind)
        warned = [x for x in run["warnings"] if "it stays sharded" in x]
        assert len(warned) == (kind == "DTensor")


def test_tiles_that_were_asked_for_and_are_none_are_named(pools):
    call = ("small_gpt", 2, "plain", {"inner": "aot_eager", "tile": 7}, 16.0)
    for run in pools[2].run(run_tiled, *call, timeout=240):
        assert any("nothing runs in tiles" in x for x in run["warnings"])
