"""Turn samples into a profile: numbers with sources, curves with their errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cpcompile.apps.calibration.fit_compute import (
    StraightLine,
    fit_kernels,
    fit_line,
    fit_overlap,
)
from cpcompile.apps.calibration.fit_links import (
    COLLECTIVES,
    RATE_FIELDS,
    fit_collectives,
    fit_hops,
    shared_bridge,
)
from cpcompile.apps.calibration.samples import Samples, SizedSample, TimedExchange
from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile

MEASURED_MERGES = ("merge_bytes_per_element", "backward_merge_bytes_per_element")


def fit_profile(
    samples: Samples,
    base: HardwareProfile,
    from_device: Mapping[str, tuple[float, str]],
    about: Mapping[str, str],
) -> HardwareProfile:
    """Return the profile that predicts `samples` best.

    base: has the numbers that were not measured. from_device: numbers that the device
    tells, with their sources; parallel_tiles is one. about: when and where it was.
    """
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    errors: dict[str, str] = {}

    def add(numbers: Mapping[str, float], source: str) -> None:
        values.update(numbers)
        sources.update(dict.fromkeys(numbers, source))

    for name, (value, source) in from_device.items():
        add({name: value}, source)

    issue = values["step_issue_seconds"]
    longer = [s for s in samples.kernels if s.seconds > 1.5 * issue]
    kernels = fit_kernels(longer, values["parallel_tiles"])
    errors["fit_error_attention"] = kernels.summary
    attention = dict(kernels.values)
    step_latency = attention.pop("kernel_launch_seconds")
    add(
        attention,
        "fitted with cost.compute.kernel_seconds to attention steps, forward and "
        f"backward, {_sizes((s.rows, s.keys) for s in longer)} tokens, dense "
        f"and causal, head dims {_listed(s.head_dim for s in longer)}: "
        + kernels.summary,
    )
    launch = statistics.median(s.seconds for s in samples.launches)
    add({"kernel_launch_seconds": launch}, "measured: copy_ of 64 elements, median")
    copies = fit_line(samples.copies)
    errors["fit_error_copies"] = copies.fit.summary
    add(
        {"memory_bytes_per_second": copies.rate},
        f"fitted to packing k and v, {_extent(samples.copies)} bytes read and written: "
        + copies.fit.summary,
    )
    merges = samples.merges, samples.backward_merges
    lines = [_line_or_none(merge_samples) for merge_samples in merges]
    for name, line, timed in zip(MEASURED_MERGES, lines, merges, strict=True):
        if line is not None:
            errors[f"fit_error_{name.removesuffix('_bytes_per_element')}"] = (
                line.fit.summary
            )
            add(
                {name: copies.rate / line.rate},
                "fitted to what a later step takes longer than a first one, "
                f"{_extent(timed)} elements, as bytes at memory_bytes_per_second: "
                + line.fit.summary,
            )
    intercepts = [line.latency for line in lines if line is not None]
    add(
        {"merge_latency_seconds": step_latency + max(intercepts, default=0.0)},
        "fitted: the latency of an attention step and that of its merge",
    )
    add(
        {"alone_speedup": samples.alone_speedup},
        "measured: an attention step on all ranks, over the same on the first alone",
    )
    add(
        samples.speeds,
        "measured: an attention step in the dtype of the rates, over one in this dtype",
    )
    if samples.overlaps:
        add(
            {"overlap_fraction": fit_overlap(samples.overlaps)},
            f"fitted to {len(samples.overlaps)} messages beside attention steps, "
            "against both alone",
        )
    _add_links(samples, values, sources, errors)
    for name in NUMBERS:
        if name not in values:
            values[name] = getattr(base, name)
            sources[name] = (
                f"not measured; profile {base.name}: {base.sources.get(name, '')}"
            )
    return replace(
        base, name="calibrated", sources=sources, about={**about, **errors}, **values
    )


def _add_links(
    samples: Samples,
    values: dict[str, float],
    sources: dict[str, str],
    errors: dict[str, str],
) -> None:
    near = [s for s in samples.messages if not s.senders]
    hops = [s for s in near if s.kind is TimedExchange.HOP]
    per_bridge, bridge = shared_bridge(near)
    if any(s.ranks > 2 for s in near):
        values |= {
            "ranks_per_bridge": float(per_bridge),
            "bridge_bytes_per_second": bridge,
        }
        text = "measured: all-to-alls in groups of 2, 4, ... ranks, all at once"
        for name in ("ranks_per_bridge", "bridge_bytes_per_second"):
            sources[name] = text if per_bridge else f"{text}: they share nothing"
    collectives = [
        s
        for s in near
        if s.kind in COLLECTIVES
        and not (s.kind is TimedExchange.ALL_TO_ALL and s.ranks > per_bridge > 0)
    ]
    for name, group, fitter in (
        ("fit_error_hop", hops, fit_hops),
        ("fit_error_collectives", collectives, fit_collectives),
    ):
        if group:
            fitted = fitter(group)
            errors[name] = fitted.summary
            kinds = _listed(s.kind.value for s in group)
            ranks = _listed(s.ranks for s in group)
            extent = _listed(int(s.sent_bytes) for s in group)
            source = (
                f"fitted to {kinds}; {extent} bytes sent per rank, groups of {ranks}: "
                + fitted.summary
            )
            values.update(fitted.values)
            sources.update(dict.fromkeys(fitted.values, source))
    alone = [s for s in samples.messages if s.senders == 1]
    together = [s for s in samples.messages if s.senders > 1]
    if alone and together:
        single, shared = fit_hops(alone), fit_hops(together)
        errors["fit_error_inter_node"] = single.summary
        latency = single.values["link_latency_seconds"]
        latency -= values.get("link_latency_seconds", 0.0)
        rate = single.values[RATE_FIELDS[TimedExchange.HOP]]
        senders = together[0].senders
        part = shared.values[RATE_FIELDS[TimedExchange.HOP]] / rate
        values["inter_node_latency_seconds"] = max(0.0, latency)
        values["inter_node_bytes_per_second"] = rate
        values["network_cards_per_node"] = min(float(senders), max(1.0, part * senders))
        source = f"fitted to messages between nodes: {single.summary}"
        for name in ("inter_node_latency_seconds", "inter_node_bytes_per_second"):
            sources[name] = source
        sources["network_cards_per_node"] = (
            f"fitted: {senders} ranks of a node that send at once get {part:.0%} each "
            "of what one alone gets"
        )


def _line_or_none(samples: tuple[SizedSample, ...]) -> StraightLine | None:
    """Fit a line; None if less than two times are positive: the rest was noise."""
    if sum(s.seconds > 0 for s in samples) < 2:
        return None
    return fit_line(samples)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(x) for x in dict.fromkeys(items))


def _sizes(pairs: Iterable[tuple[int, int]]) -> str:
    return _listed(f"{rows} x {keys}" for rows, keys in pairs)


def _extent(samples: tuple[SizedSample, ...]) -> str:
    sizes = [s.size for s in samples]
    return f"{min(sizes):.0f} to {max(sizes):.0f}"
