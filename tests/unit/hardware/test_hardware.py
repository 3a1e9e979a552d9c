"""Hardware profiles: what ships, which describes a machine, and wrong ones."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.apps.calibration import main
from cpcompile.cost.hardware.profile import (
    NUMBERS,
    PROFILES,
    load_profile,
    profile_names,
    read_profile,
    write_profile,
)
from cpcompile.cost.hardware.selection import calibrated_path, profile_for_device
from cpcompile.frontend.request import ranks_on_this_node
from tests.golden.capture import fake_group

# Peaks, not sparse ones: bf16 TFLOP/s; memory in TB/s and GB; GB/s per direction to the
# next rank, and to all others. Sources: vendors' data sheets, and stas00/ml-engineering
# @744d01e for what these leave out. A100 and A800 PCIe have HBM2e at 1.94 TB/s.
PEAKS = {
    "a100_pcie": (312, 1.94, 80, 31.5, 31.5),
    "a100_sxm": (312, 2.04, 80, 300, 300),
    "a800_pcie": (312, 1.94, 80, 31.5, 31.5),
    "a800_sxm": (312, 2.04, 80, 200, 200),
    "b200_sxm": (2250, 8.0, 180, 900, 900),
    "b300_sxm": (2250, 8.0, 270, 900, 900),
    "gb200": (2500, 8.0, 186, 900, 900),
    "h100_pcie": (756, 2.0, 80, 63, 63),
    "h100_sxm": (989.4, 3.35, 80, 450, 450),
    "h200_sxm": (989.4, 4.8, 141, 450, 450),
    "h20_sxm": (148, 4.0, 96, 450, 450),
    "h800_sxm": (989.4, 3.35, 80, 200, 200),
    "l20": (119.5, 0.864, 48, 31.5, 31.5),
    "l40s": (362, 0.864, 48, 31.5, 31.5),
    "mi300x": (1307, 5.3, 192, 64, 448),
    "mi325x": (1300, 6.0, 256, 64, 448),
    "mi355x": (2500, 8.0, 288, 76.5, 535.5),
    "rtx_4090": (165.2, 1.008, 24, 31.5, 31.5),
    "rtx_4090d": (147, 1.008, 24, 31.5, 31.5),
}
GPUS = sorted(PEAKS)


def changed(missing: str = "", **changes: object) -> bytes:
    """The shipped CPU profile with changes, and without a field."""
    content = json.loads((PROFILES / "cpu.json").read_text(encoding="utf-8")) | changes
    content.pop(missing, None)
    return json.dumps(content).encode()


def message_for(tmp_path: Path, content: bytes) -> str:
    """The error for a file, without its path."""
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_profile(path)
    assert type(caught.value) is ValueError
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_profiles_say_where_every_number_is_from(name: str) -> None:
    assert profile_names() == sorted([*GPUS, "cpu"])
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.sources) == set(NUMBERS)
    assert all(len(text) > 4 for text in profile.sources.values())


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_achieved_ones(name: str) -> None:
    flops, memory, gigabytes, link, everyone = PEAKS[name]
    profile = load_profile(name)
    dense = profile.forward_flops_per_second
    assert 0.2 * flops * 1e12 < dense < flops * 1e12
    assert 0.85 * dense < profile.causal_forward_flops_per_second <= dense
    assert 0.6 * dense < profile.backward_flops_per_second <= dense
    assert (
        0.85 * profile.backward_flops_per_second
        < profile.causal_backward_flops_per_second
        <= profile.backward_flops_per_second
    )
    assert profile.speed(1) == profile.speed(2) == 1  # the rates are of bfloat16
    assert 1 > profile.speed(4) >= profile.speed(8) > 0
    assert 0.7 * memory * 1e12 < profile.memory_bytes_per_second < memory * 1e12
    assert profile.memory_bytes == gigabytes * 1e9
    assert 0.15 * link * 1e9 < profile.link_bytes_per_second < link * 1e9
    for rate in (
        profile.collective_bytes_per_second,
        profile.reduce_scatter_bytes_per_second,
        profile.all_to_all_bytes_per_second,
    ):
        assert 0.15 * everyone * 1e9 < rate < everyone * 1e9
    assert profile.inter_node_bytes_per_second < 100e9
    assert 10e-6 <= profile.link_latency_seconds <= 40e-6


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "h100_sxm"),
        ("H100_SXM", "h100_sxm"),
        ("h100-pcie", "h100_pcie"),
        ("RTX 4090", "rtx_4090"),
        ("4090", "rtx_4090"),
        ("4090D", "rtx_4090d"),
        ("MI300X", "mi300x"),
        ("cpu", "cpu"),
    ],
)
def test_names_that_people_use(name: str, found: str) -> None:
    assert load_profile(name) is load_profile(found)


def test_unknown_name_lists_all_and_names_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        load_profile("h1000")
    assert str(caught.value) == (
        f"hardware profile 'h1000' is unknown: there are {', '.join(profile_names())}, "
        "or the path of a .json file; did you mean 'h100_sxm'?"
    )


def test_paths_and_overrides(tmp_path: Path) -> None:
    profile = load_profile("h100").with_overrides({"link_bytes_per_second": 1e9})
    write_profile(profile, tmp_path / "mine.json")
    found = load_profile(str(tmp_path / "mine.json"))
    assert found == replace(profile, name="mine")
    assert (found.sources, found.about) == (profile.sources, profile.about)
    with pytest.raises(ValueError, match="cannot be read"):
        load_profile(str(tmp_path / "none.json"))
    h100 = load_profile("h100")
    eager = h100.with_overrides({"merge_bytes_per_element": 44})
    assert eager == replace(h100, merge_bytes_per_element=44.0)
    assert isinstance(eager.merge_bytes_per_element, float)
    assert h100.with_overrides({}) == h100
    ideal = h100.with_overrides({"link_latency_seconds": 0})
    assert ideal.link_latency_seconds == 0.0


FIRST, *OTHERS = NUMBERS
ABOUT = "`about` is no object of texts"
RATE = "memory_bytes_per_second"
BROKEN = {
    "missing": (
        changed(missing="link_bytes_per_second"),
        "field 'link_bytes_per_second' is missing; add a number or calibrate again",
    ),
    "misspelt": (
        changed(link_bytes_per_secnd=1e9),
        "field 'link_bytes_per_secnd' is unknown; did you mean "
        "'link_bytes_per_second'?",
    ),
    "without source": (
        changed(sources=dict.fromkeys(OTHERS, "measured")),
        f"field {FIRST!r} has no text in `sources`; say its origin",
    ),
    "no object": (b"[]", "needs an object with"),
    "empty": (b"{}", "needs an object with"),
    "sources a number": (b'{"sources": 1}', "needs an object with"),
    "cut off": (b"{", "is no JSON: "),
    "another encoding": (b"\xff\xfe{\x00", "is no UTF-8 text"),
    "deep": (b"[" * 100_000, "is no JSON"),
    "deep inside": (b'{"sources": {}, "about": ' + b'{"a":' * 100_000, "is no JSON"),
    "too large": (
        changed(memory_bytes=10**400),
        "field 'memory_bytes' is too large for a float",
    ),
    "many digits": (b'{"memory_bytes": ' + b"1" * 5000 + b"}", "is no JSON"),
    "about a text": (changed(about="x"), ABOUT),
    "about numbers": (changed(about={"x": 1}), ABOUT),
    "about null": (changed(about=None), ABOUT),
    "rate of 0": (changed(**{RATE: 0}), f"field {RATE!r} is "),
    "rate a word": (changed(**{RATE: "fast"}), f"field {RATE!r} is "),
    "rate a bool": (changed(**{RATE: True}), f"field {RATE!r} is "),
    "endless rate": (changed(**{RATE: float("inf")}), f"field {RATE!r} is "),
    "no rate": (changed(**{RATE: float("nan")}), f"field {RATE!r} is "),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_error_that_names_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    assert message_for(tmp_path, content).startswith(message)


@pytest.mark.parametrize("field", NUMBERS)
def test_any_field_may_be_the_one_that_is_missing_or_negative(
    tmp_path: Path, field: str
) -> None:
    none, negative = changed(missing=field), changed(**{field: -1e-6})
    assert f"field {field!r} is missing" in message_for(tmp_path, none)
    assert f"field {field!r} is -1e-06; it must be" in message_for(tmp_path, negative)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("merge_bytes", 44.0, "field 'merge_bytes' is unknown; did you mean 'memory_b"),
        ("name", 1.0, "field 'name' is unknown; did you mean 'memory_bytes'?"),
        ("merge_bytes_per_element", -1.0, "'merge_bytes_per_element' is -1.0; it must "
         "be finite and not negative"),
        (RATE, 0.0, f"{RATE!r} is 0; it must be positive"),
        ("overlap_fraction", 1.5, "'overlap_fraction' is 1.5; it must be from 0 to 1"),
        ("memory_bytes", 10**400, "'memory_bytes' is too large for a float"),
    ],
)  # fmt: skip
def test_overrides_that_are_wrong(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_profile("h100").with_overrides({name: value})
    assert str(caught.value).startswith(f"overrides: {message}")


def test_a_link_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is said before anything is measured."""
    target, link = tmp_path / "precious.json", tmp_path / "mine.json"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(ValueError, match=r"mine\.json is a link to .*precious\.json"):
        write_profile(load_profile("cpu"), link)
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--output", str(link)])
    assert "is a link to" in capsys.readouterr().err
    assert target.read_text() == "precious" and link.is_symlink()


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_profile(load_profile("h100"), path)
    before = path.read_text()
    with (
        mock.patch.object(os, "fsync", side_effect=OSError("no space left")),
        pytest.raises(OSError, match="no space left"),
    ):
        write_profile(load_profile("cpu"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    write_profile(load_profile("cpu"), path)
    assert read_profile(path).sources == load_profile("cpu").sources
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPCOMPILE_CACHE", str(tmp_path / "cache"))


DEVICES = {
    "h100_sxm": ("NVIDIA H100 80GB HBM3", "Tesla T4", ""),  # nothing is known of T4
    "h100_pcie": ("NVIDIA H100 PCIe",), "h800_sxm": ("NVIDIA H800",),
    "a100_sxm": ("NVIDIA A100-SXM4-80GB",), "a100_pcie": ("NVIDIA A100 80GB PCIe",),
    "a800_sxm": ("NVIDIA A800-SXM4-80GB",), "a800_pcie": ("NVIDIA A800 80GB PCIe",),
    "h200_sxm": ("NVIDIA H200",), "h20_sxm": ("NVIDIA H20",),
    "b200_sxm": ("NVIDIA B200",), "gb200": ("NVIDIA GB200",),
    "l40s": ("NVIDIA L40S",), "l20": ("NVIDIA L20",),
    "rtx_4090": ("NVIDIA GeForce RTX 4090",),
    "rtx_4090d": ("NVIDIA GeForce RTX 4090 D",),
    "mi300x": ("AMD Instinct MI300X",), "mi325x": ("AMD Instinct MI325X",),
    "mi355x": ("AMD Instinct MI355X",),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_gpus_are_known_by_their_names(name: str) -> None:
    for device in DEVICES[name]:
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
