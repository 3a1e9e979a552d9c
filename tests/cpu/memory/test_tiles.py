"""What runs tile by tile on several ranks equals one process, and is said."""

import logging

import pytest

from cpcompile import config
from cpcompile.errors import OptionRejected
from cpcompile.logs import warn_once
from cpcompile.options import parse_options
from cpcompile.reporting.report import recording
from tests.cpu.model_cases import check_model, run_model

SEQ = 64


def run_tiled(name, world, door, options, least=1e-3):
    warn_once.cache_clear()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("cpcompile")
    log.addHandler(handler)
    with config.patch(tile_least_megabytes=least), recording() as reports:
        run = run_model(name, SEQ, world, door, options)
    log.removeHandler(handler)
    run["warnings"] = records
    run["tiles"] = [tile for report in reports for tile in report.tiles]
    lines = [line for report in reports for line in report.edges()]
    run["lines"] = [line for line in lines if "in tiles" in line]
    return run


@pytest.mark.core(
    "llama-2-plain-inductor-8",
    "small_gpt-3-plain-aot_eager-5",
    "checkpoint_all-2-plain-aot_eager-8",
)
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


@pytest.mark.parametrize("tile", ["auto", None])
def test_what_is_small_or_not_asked_for_is_left(pools, tile):
    call = ("llama", 2, "plain", {"inner": "aot_eager", "tile": tile})
    least = 16.0 if tile == "auto" else 1e-3
    for rank, run in enumerate(pools[2].run(run_tiled, *call, least, timeout=240)):
        check_model("llama", SEQ, run["values"], rank)
        assert run["tiles"] == []


def run_auto():
    with config.patch(tile_megabytes=0.02):
        return run_tiled("llama", 2, "plain", {"inner": "aot_eager"})


def test_auto_leaves_logits_that_are_returned(pools):
    for rank, run in enumerate(pools[2].run(run_auto, timeout=240)):
        check_model("llama", SEQ, run["values"], rank)
        assert run["tiles"] == []
        assert any("beside the loss" in x for x in run["warnings"])


def test_tiles_that_were_asked_for_and_are_none_are_named(pools):
    call = ("llama", 2, "plain", {"inner": "aot_eager", "tile": 7}, 16.0)
    for run in pools[2].run(run_tiled, *call, timeout=240):
        assert any("nothing runs in tiles" in x for x in run["warnings"])


def test_options_are_checked():
    for wrong in (0, -1, 2.5, "all", True):
        with pytest.raises(OptionRejected, match="or a positive number of tokens"):
            parse_options({"tile": wrong})
    assert parse_options({}).tile == "auto" and parse_options({"tile": 9}).tile == 9
