"""`cpcompile calibrate` on gloo ranks: mechanics, for timings are what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cpcompile.apps.calibration import Effort, calibrate, main
from cpcompile.apps.calibration.stopwatch import Stopwatch
from cpcompile.cost.hardware.profile import NUMBERS, profile_text
from cpcompile.cost.hardware.selection import calibrated_path, profile_for_device

SHORTEST = Effort(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, long=False)


def test_the_command_writes_what_auto_picks_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPCOMPILE_CACHE", str(tmp_path))
    assert profile_for_device("cpu", ranks=2).name == "cpu"
    assert main(["--ranks", "2", "--quick"]) == 0
    assert calibrated_path("cpu", 2).is_relative_to(tmp_path)
    profile = profile_for_device("cpu", ranks=2)
    assert profile.name == "cpu_2_ranks"
    assert profile_for_device("cpu", ranks=4).name == "cpu"
    assert set(profile.sources) == set(NUMBERS)
    assert profile.ranks_per_node == 2
    assert {"date", "torch", "triton", "device", "backend"} <= set(profile.about)
    for curve in ("attention", "copies", "merge", "hop", "collectives"):
        assert "median error" in profile.about[f"fit_error_{curve}"]
    not_measured = {k for k, text in profile.sources.items() if "not measured" in text}
    # Two ranks show no latency per further rank, and one machine no bridge.
    assert not_measured <= {
        "bridge_bytes_per_second",
        "ranks_per_bridge",
        "collective_latency_per_rank_seconds",
        "backward_merge_bytes_per_element",
        "merge_bytes_per_element",
    }


def run_calibrate(local_world_size: str) -> tuple[str, float, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        profile = calibrate(dist.group.WORLD, torch.device("cpu"), SHORTEST)
    source = profile.sources["inter_node_bytes_per_second"]
    return profile_text(profile), profile.ranks_per_node, source


@pytest.mark.parametrize(
    ("local", "near", "source"),
    [("4", 4, "as the links"), ("2", 2, "fitted to"), ("1", 4, "as the links")],
)
def test_all_ranks_get_the_same_profile(pools, local, near, source):
    answers = pools[4].run(run_calibrate, local, timeout=150.0)
    assert len({text for text, _, _ in answers}) == 1
    assert answers[0][1] == near
    assert answers[0][2].startswith(source)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ([], "give --ranks N"),
        (["--ranks", "1"], "needed 2 or more"),
        (["--ranks", "2", "--output", "a.txt"], "ends in .json"),
    ],
)
def test_mistakes_say_what_is_needed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], needed: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert needed in capsys.readouterr().err


def test_ranks_are_not_started_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--ranks", "2"])
    assert "torchrun already has" in capsys.readouterr().err


def exchange_texts() -> tuple[str, str, bool]:
    """What the first rank says; any pickling is an error."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(dist.distributed_c10d, name, None)
        watch = Stopwatch.of(dist.group.WORLD, torch.device("cpu"))
        first = dist.get_rank() == 0
        text = watch.from_first_rank("µs, of rank 0" if first else None)
        empty = watch.from_first_rank("" if first else None)
    return text, empty, watch.shared_clock


def test_texts_travel_as_bytes(pools):
    assert pools[2].run(exchange_texts) == [("µs, of rank 0", "", True)] * 2
