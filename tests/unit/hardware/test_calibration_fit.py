"""Fits find the numbers that made the timings, exactly and through noise."""

from dataclasses import replace

import numpy as np
import pytest

from cpcompile.apps.calibration.fit_profile import (
    KernelSample,
    MessageSample,
    Samples,
    TimedExchange,
    fit,
    fit_kernels,
    fit_messages,
    fit_overlap,
    fit_profile,
)
from cpcompile.apps.calibration.measure import LONG_SHAPES, SHAPES
from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile, load_profile
from cpcompile.cost.plans import Direction, Workload

NOISE = 0.05
KIB, MIB = 2**10, 2**20
TRUTH = load_profile("cpu").with_overrides(
    {
        "forward_flops_per_second": 60e9,
        "causal_forward_flops_per_second": 50e9,
        "backward_flops_per_second": 55e9,
        "causal_backward_flops_per_second": 45e9,
        "softmax_head_dims": 10.0,
        "forward_row_overhead_keys": 20.0,
        "backward_row_overhead_keys": 30.0,
        "tile_tokens": 200.0,
        "parallel_tiles": 0.0,
        "kernel_launch_seconds": 1e-4,
    }
)
DEVICE = {"parallel_tiles": (0.0, "told"), "step_issue_seconds": (0.0, "told")}
RATES = [name for name in NUMBERS if name.endswith("flops_per_second")]


def noisy(seconds: float, rng: np.random.Generator | None) -> float:
    return seconds if rng is None else seconds * float(np.exp(rng.normal(0, NOISE)))


def kernel_seconds(sample: KernelSample, truth: HardwareProfile) -> float:
    """Written out anew: what docs/cost_model.md says of one kernel."""
    name = "backward" if sample.backward else "forward"
    full = getattr(truth, f"{name}_flops_per_second")
    causal = getattr(truth, f"causal_{name}_flops_per_second")
    overhead = sample.rows * getattr(truth, f"{name}_row_overhead_keys")
    soft = truth.softmax_head_dims
    pair = 4 * sample.heads * (sample.head_dim + soft)
    pair *= (2.5 if sample.backward else 1.0) * 128 / (128 + soft)
    if not sample.causal:
        return pair * (sample.pairs + overhead) / full + truth.kernel_launch_seconds
    edge = sample.rows * truth.tile_tokens / 2
    busy = overhead / full + (sample.pairs + edge) / causal
    return pair * busy + truth.kernel_launch_seconds


def kernel_samples(rng: np.random.Generator | None) -> list[KernelSample]:
    made = [
        KernelSample(2, dim, rows, keys, causal, backward, 0.0)
        for dim in (64, 128)
        for rows, keys, causal in (*SHAPES[True], *LONG_SHAPES[True])
        if not causal or rows >= 200  # below, the model may cap the tile
        for backward in (False, True)
    ]
    return [replace(s, seconds=noisy(kernel_seconds(s, TRUTH), rng)) for s in made]


def message_samples(rng: np.random.Generator | None) -> list[MessageSample]:
    rates = dict(zip(TimedExchange, (1.5e9, 8e8, 4e8, 1e9), strict=True))
    found = []
    for kind, rate in rates.items():
        for ranks in (2, 4):
            for size in (KIB, 64 * KIB, MIB, 16 * MIB):
                latency = (
                    1e-4 if kind is TimedExchange.HOP else 2e-4 + (ranks - 2) * 5e-5
                )
                sent = float(size * (1 if kind is TimedExchange.HOP else ranks - 1))
                time = noisy(latency + sent / rate, rng)
                found.append(MessageSample(kind, ranks, sent, time))
    return found


def samples_with(messages: tuple[MessageSample, ...]) -> Samples:
    sized = tuple((n, 1e-5 + n / 1e9) for n in (1e3, 1e5, 1e7))
    return Samples(
        kernels=tuple(kernel_samples(None)),
        copies=sized,
        merges=sized,
        backward_merges=((1e3, -1e-6),) * 3,
        launch=3e-6,
        messages=messages,
        overlaps=((1.0, 1.0, 1.5),),
    )


@pytest.mark.parametrize(("noise", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_fit_kernels(noise: bool, tolerance: float) -> None:
    rng = np.random.default_rng(0) if noise else None
    found = fit_kernels(kernel_samples(rng), parallel_tiles=0.0)
    for name in RATES:
        assert found.values[name] == pytest.approx(getattr(TRUTH, name), rel=tolerance)
    # Through noise the times come back as well as they were measured, if not every
    # parameter: a launch and the overhead of rows are much alike.
    assert np.median(found.errors) < (NOISE if noise else 1e-4)
    if not noise:
        for name in found.values:
            expected = getattr(TRUTH, name)
            assert found.values[name] == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize(("noise", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_fit_messages(noise: bool, tolerance: float) -> None:
    samples = message_samples(np.random.default_rng(1) if noise else None)
    hops = fit_messages([s for s in samples if s.kind is TimedExchange.HOP])
    assert hops.values["link_latency_seconds"] == pytest.approx(1e-4, rel=tolerance)
    assert hops.values["link_bytes_per_second"] == pytest.approx(1.5e9, rel=tolerance)
    rest = fit_messages([s for s in samples if s.kind is not TimedExchange.HOP])
    expected = {
        "collective_latency_seconds": 2e-4,
        "collective_latency_per_rank_seconds": 5e-5,
        "collective_bytes_per_second": 8e8,
        "reduce_scatter_bytes_per_second": 4e8,
        "all_to_all_bytes_per_second": 1e9,
    }
    for name, value in expected.items():
        loose = 3 * tolerance if "per_rank" in name else tolerance
        assert rest.values[name] == pytest.approx(value, rel=loose), name


def test_messages_between_nodes_show_how_many_cards_there_are() -> None:
    def sample(size: int, rate: float, senders: int) -> MessageSample:
        time = 3e-4 + size / rate
        return MessageSample(TimedExchange.HOP, 2, float(size), time, senders)

    sizes = (KIB, 64 * KIB, MIB, 16 * MIB)
    far = [sample(n, rate, s) for n in sizes for rate, s in ((1e9, 1), (2.5e8, 8))]
    samples = samples_with((*message_samples(None), *far))
    profile = fit_profile(samples, load_profile("cpu"), DEVICE, {})
    assert profile.inter_node_bytes_per_second == pytest.approx(1e9, rel=1e-3)
    assert profile.inter_node_latency_seconds == pytest.approx(2e-4, rel=1e-2)
    assert profile.network_cards_per_node == pytest.approx(2.0, rel=1e-3)
    assert profile.link_bytes_per_second == pytest.approx(1.5e9, rel=1e-3)


def test_all_to_alls_show_a_bridge_that_ranks_share() -> None:
    def sample(ranks: int, size: int, rate: float) -> MessageSample:
        sent = float(size * (ranks - 1))
        time = 2e-4 + (ranks - 2) * 5e-5 + sent / rate
        return MessageSample(TimedExchange.ALL_TO_ALL, ranks, sent, time)

    # Four ranks of eight send 4 of 7 messages through a bridge of 5e8 bytes per second.
    across = 5e8 / 4 * 7 / 4
    rates = {2: 1e9, 4: 1e9, 8: across}
    near = [s for s in message_samples(None) if s.kind is not TimedExchange.ALL_TO_ALL]
    sizes = (KIB, 64 * KIB, MIB, 64 * MIB)
    shared = [sample(n, size, rate) for n, rate in rates.items() for size in sizes]

    def fitted(messages: list[MessageSample]) -> HardwareProfile:
        samples = samples_with((*near, *messages))
        return fit_profile(samples, load_profile("l20"), DEVICE, {})

    profile = fitted(shared)
    assert profile.ranks_per_bridge == 4
    assert profile.bridge_bytes_per_second == pytest.approx(5e8, rel=0.01)
    assert profile.all_to_all_bytes_per_second == pytest.approx(1e9, rel=0.01)
    alike = [sample(n, size, 1e9) for n in rates for size in sizes]
    profile = fitted(alike)
    assert profile.ranks_per_bridge == profile.bridge_bytes_per_second == 0
    assert "share nothing" in profile.sources["ranks_per_bridge"]


@pytest.mark.parametrize("fraction", [-0.5, 0.0, 0.4, 1.0, 1.1])
def test_fit_overlap(fraction: float) -> None:
    samples = [
        (t, c, t + c - fraction * min(t, c)) for t in (1e-3, 5e-3) for c in (2e-3, 4e-3)
    ]
    assert fit_overlap(samples) == pytest.approx(min(1.0, max(0.0, fraction)))


@pytest.mark.parametrize(("most", "found"), [(10.0, 3.0), (2.0, 2.0)])
def test_fit_keeps_within_bounds_and_bears_an_outlier(
    most: float, found: float
) -> None:
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    times = sizes * 3
    times[2] *= 5
    fitted = fit({"slope": (1.0, 0.1, most)}, lambda v: v["slope"] * sizes, times)
    assert fitted.values["slope"] == pytest.approx(found, rel=0.1)


def test_fit_profile_has_every_number_with_its_source() -> None:
    samples = samples_with(tuple(message_samples(None)))
    base = load_profile("cpu")
    profile = fit_profile(samples, base, DEVICE, {"date": "today"})
    assert set(profile.sources) == set(NUMBERS)
    assert profile.forward_flops_per_second == pytest.approx(60e9, rel=1e-3)
    assert profile.memory_bytes_per_second == pytest.approx(1e9, rel=1e-3)
    assert profile.merge_bytes_per_element == pytest.approx(1.0, rel=1e-3)
    assert profile.kernel_launch_seconds == 3e-6
    assert profile.overlap_fraction == pytest.approx(0.5)
    # Only noise was measured of these, or nothing.
    for name in ("backward_merge_bytes_per_element", "inter_node_bytes_per_second"):
        assert getattr(profile, name) == getattr(base, name)
        assert profile.sources[name].startswith("not measured; profile cpu: ")
    assert profile.about["date"] == "today"
    assert profile.about["fit_error_hop"].startswith("median error 0.0%, worst 0.0%")
    call = Workload(1, 8, 8, 4096, 4096, 64, 64, 4, True, Direction.BOTH, 4)
    assert choose(call, profile).hardware == "calibrated"
