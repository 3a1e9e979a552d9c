"""Which profile describes a machine, and how many ranks are on one node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.cost.hardware.profile import load_profile, write_profile
from cpcompile.cost.hardware.selection import calibrated_path, profile_for_device
from cpcompile.frontend.machine import ranks_on_this_node
from tests.golden.capture import fake_group


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPCOMPILE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800_sxm"),
        ("NVIDIA A800 80GB PCIe", "a800_pcie"),
        ("NVIDIA H800", "h800_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA H20", "h20_sxm"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx_4090d"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Tesla T4", "h100_sxm"),  # nothing is known of it
        ("", "h100_sxm"),
    ],
)
def test_gpus_are_known_by_their_names(device: str, name: str) -> None:
    assert profile_for_device("cuda", device) is load_profile(name)


def test_devices_without_a_profile() -> None:
    assert profile_for_device("cpu") is load_profile("cpu")
    with pytest.raises(ValueError) as caught:
        profile_for_device("xla")
    assert str(caught.value) == (
        "device type 'xla' has no hardware profile: there are profiles for cpu, cuda; "
        "run `cpcompile calibrate`, or name one in cpcompile.config.hardware"
    )


def test_a_calibrated_profile_goes_first() -> None:
    mine = load_profile("h100").with_overrides({"memory_bytes": 1e9})
    write_profile(mine, calibrated_path("cuda", 4))
    found = profile_for_device("cuda", "NVIDIA A100-SXM4-80GB", ranks=4)
    assert (found, found.name) != (mine, mine.name)
    assert found.memory_bytes == 1e9
    assert found.name == "cuda_4_ranks"
    assert profile_for_device("cuda", "", ranks=8) is load_profile("h100")
    calibrated_path("cuda", 4).write_text("{}")
    with pytest.raises(ValueError, match=r"cuda_4_ranks\.json: needs an object"):
        profile_for_device("cuda", "", ranks=4)


def test_where_calibrated_profiles_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path("profiles", "cuda_4_ranks.json")
    assert calibrated_path("cuda", 4) == tmp_path / "cache" / name
    monkeypatch.setenv("CPCOMPILE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert calibrated_path("cuda", 4) == Path("/somewhere/cpcompile") / name


ORDERS = [
    ("4", [0, 1, 2, 3, 4, 5, 6, 7], 4),
    ("8", [0, 1, 2, 3, 4, 5, 6, 7], 8),
    ("2", [0, 1, 4, 5], 2),
    ("4", [0, 4, 1, 5], None),  # each neighbour is on the other node
    ("2", [0, 2, 1, 3], None),
    ("1", [0, 2, 1, 3], 1),
    ("", [0, 1], None),
]


@pytest.mark.parametrize(("local", "order", "near"), ORDERS)
def test_they_have_to_follow_each_other(monkeypatch, local, order, near):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(
        torch.distributed, "get_process_group_ranks", lambda group: order
    )
    with fake_group(ranks=8):
        mesh = DeviceMesh("cpu", list(range(8)))
        assert ranks_on_this_node(mesh, 0) == near
