"""Fit the numbers of a profile to samples; neither ranks nor a device are needed.

The residual of a time is log(predicted / measured), so that microseconds count as much
as seconds, and parameters are searched for in their logarithms. What is fitted is a sum
of latencies and of sizes over rates, or the formula `kernel_seconds` of the cost model
itself, so that what is found is what the model will use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]  # sympy ships no type information
from numpy.typing import NDArray

from cpcompile.cost import symbols
from cpcompile.cost.compute import kernel_seconds
from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile

Vector = NDArray[np.float64]
Values = dict[str, float]
Sized = Sequence[tuple[float, float]]
"""Sizes, and the seconds of an operation with a latency and a time per element."""
Overlap = tuple[float, float, float]
"""Seconds of a message and of a computation, each alone, and of both at once."""
_Found = tuple[str, Mapping[str, float], str, "Fit | None"]
"""Where numbers of a profile come from, the numbers, and the curve of a fit."""

_STEPS = 200
_SMALLEST_STEP = 1e-9
_DIFFERENCE = 1e-5
# A residual larger than this, 20 %, counts less than by its square: one disturbed
# timing must not bend the rest (the pseudo-Huber loss).
_OUTLIER = 0.2
_FLOPS = (1e7, 1e16)  # nothing computes slower, or faster
_SMALL = 1e-3  # what is found to be about this small is written as 0
_ALIKE = 0.7  # groups whose all-to-alls differ by less share nothing
_KERNEL = {  # the fields of a profile that `kernel_seconds` reads, but parallel_tiles
    "forward_flops_per_second": symbols.F_fwd,
    "causal_forward_flops_per_second": symbols.F_fwd_causal,
    "backward_flops_per_second": symbols.F_bwd,
    "causal_backward_flops_per_second": symbols.F_bwd_causal,
    "softmax_head_dims": symbols.softmax,
    "forward_row_overhead_keys": symbols.row_fwd,
    "backward_row_overhead_keys": symbols.row_bwd,
    "tile_tokens": symbols.tile,
    "kernel_launch_seconds": symbols.launch,
}


class TimedExchange(Enum):
    """The exchanges that operators are made of, and the fields of their rates."""

    HOP = ("send/recv to the next rank", "link_bytes_per_second")
    ALL_GATHER = ("all-gather", "collective_bytes_per_second")
    REDUCE_SCATTER = ("reduce-scatter", "reduce_scatter_bytes_per_second")
    ALL_TO_ALL = ("all-to-all", "all_to_all_bytes_per_second")


@dataclass(frozen=True)
class MessageSample:
    """One exchange in a group of `ranks`, in which each sends `sent_bytes` in all.

    senders: 0 for ranks of one node; else how many ranks of a node sent at once to
    another one.
    """

    kind: TimedExchange
    ranks: int
    sent_bytes: float
    seconds: float
    senders: int = 0


@dataclass(frozen=True)
class KernelSample:
    """One attention step without earlier ones: `rows` queries on `keys` keys.

    causal: the triangle of an equal number of rows and keys, instead of all pairs.
    """

    heads: int
    head_dim: int
    rows: int
    keys: int
    causal: bool
    backward: bool
    seconds: float

    @property
    def pairs(self) -> float:
        """(query, key) pairs that the mask leaves."""
        if self.causal:
            return self.rows * (self.rows + 1) / 2
        return self.rows * self.keys


@dataclass(frozen=True)
class Samples:
    """All samples of a calibration, in seconds of the slowest rank.

    copies: by bytes read and written. merges, backward_merges: by elements of the
    output, and of the queries. launch: of a kernel with next to nothing to do.
    alone_speedup: of an attention step on one rank, while the others wait. speeds: of
    dtypes, by the fields of a profile.
    """

    kernels: Sequence[KernelSample]
    copies: Sized
    merges: Sized
    backward_merges: Sized
    launch: float
    messages: Sequence[MessageSample]
    overlaps: Sequence[Overlap]
    alone_speedup: float = 1.0
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Fitted parameters, and how far their predictions are from what was measured."""

    values: Values
    errors: Vector  # |predicted / measured - 1| of every time

    @property
    def summary(self) -> str:
        """Text of the median and the worst error, as a profile records it."""
        median, worst = np.median(self.errors), self.errors.max()
        return (
            f"median error {median:.1%}, worst {worst:.1%} of {self.errors.size} times"
        )


def fit(
    parameters: Mapping[str, tuple[float, float, float]],
    predict: Callable[[Values], Vector],
    times: Vector,
) -> Fit:
    """Find the parameters of the smallest loss, by Levenberg's and Marquardt's method.

    parameters: start and bounds of each; the search runs from all starts times 1, a
    tenth, and ten.
    """
    first, low, high = np.log([*parameters.values()]).T

    def named(x: Vector) -> Values:
        return dict(zip(parameters, np.exp(x).tolist(), strict=True))

    def residuals(x: Vector) -> Vector:
        ratio: Vector = np.log(np.maximum(predict(named(x)), 1e-300) / times)
        return ratio

    solutions = [
        _search(np.clip(first + np.log(scale), low, high), residuals, low, high)
        for scale in (1.0, 0.1, 10.0)
    ]
    best = min(solutions, key=lambda x: _loss(residuals(x)))
    return Fit(named(best), np.abs(np.expm1(residuals(best))))


def _loss(residual: Vector) -> float:
    return float(np.sum(np.sqrt(1 + (residual / _OUTLIER) ** 2) - 1))


def _search(
    x: Vector, residuals: Callable[[Vector], Vector], low: Vector, high: Vector
) -> Vector:
    """Search for a local minimum within the bounds, starting from x."""
    damping, residual = 1e-2, residuals(x)
    for _ in range(_STEPS):
        moves = _DIFFERENCE * np.eye(len(x))
        jacobian = np.stack([residuals(x + m) - residual for m in moves], axis=1)
        jacobian /= _DIFFERENCE
        weight = 1 / np.sqrt(1 + (residual / _OUTLIER) ** 2)
        gradient = jacobian.T @ (weight * residual)
        # What a bound holds back stays where it is.
        free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
        if not free.any() or damping > 1e9:
            break
        active = jacobian[:, free]
        curvature = active.T @ (weight[:, None] * active)
        scale = np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature + damping * scale, gradient[free])
        moved = np.clip(x + np.clip(step, -2.0, 2.0), low, high)
        new = residuals(moved)
        if _loss(new) >= _loss(residual):
            damping *= 5
            continue
        change = float(np.max(np.abs(moved - x)))
        x, residual, damping = moved, new, max(damping / 5, 1e-9)
        if change < _SMALLEST_STEP:
            break
    return x


def fit_sums(
    latencies: Mapping[str, Sequence[float]],
    rates: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
) -> Fit:
    """Fit times that are a sum of latencies and of sizes over rates.

    Times that are not positive were disturbed, and are left out.
    latencies, rates: for each time, how often a latency is in it, and how many bytes or
        elements at a rate.
    """
    good = np.array(seconds) > 0
    times = np.array(seconds)[good]
    counts, sizes = (
        {name: np.array(x, dtype=np.float64)[good] for name, x in terms.items()}
        for terms in (latencies, rates)
    )
    shortest = float(times.min())
    bounds = dict.fromkeys(counts, (shortest / 2, shortest * 1e-4, float(times.max())))
    for name, size in sizes.items():
        start = float(size.max() / times[size.argmax()])
        bounds[name] = (start, start / 1e3, start * 1e3)

    def predict(values: Values) -> Vector:
        terms = [count * values[name] for name, count in counts.items()]
        terms += [size / values[name] for name, size in sizes.items()]
        predicted: Vector = np.sum(terms, axis=0)
        return predicted

    return fit(bounds, predict, times)


def fit_line(samples: Sized) -> Fit:
    """Fit a latency and a rate."""
    sizes, seconds = zip(*samples, strict=True)
    return fit_sums({"latency": [1] * len(sizes)}, {"rate": sizes}, seconds)


def fit_messages(samples: Sequence[MessageSample]) -> Fit:
    """Fit one latency, and a rate for each kind of exchange.

    With collectives in groups of several sizes also a latency per further rank.
    """
    kind = "link" if samples[0].kind is TimedExchange.HOP else "collective"
    latencies: dict[str, list[float]] = {f"{kind}_latency_seconds": [1] * len(samples)}
    if kind == "collective" and len({s.ranks for s in samples}) > 1:
        further = [float(s.ranks - 2) for s in samples]
        latencies["collective_latency_per_rank_seconds"] = further
    rates = {
        each.value[1]: [s.sent_bytes * (s.kind is each) for s in samples]
        for each in dict.fromkeys(s.kind for s in samples)
    }
    return fit_sums(latencies, rates, [s.seconds for s in samples])


def fit_kernels(samples: Sequence[KernelSample], parallel_tiles: float) -> Fit:
    """Fit the fields of a profile that `kernel_seconds` reads, but parallel_tiles."""
    names = ("heads", "head_dim", "rows", "pairs", "causal", "backward", "seconds")
    heads, dims, rows, pairs, causal, backward, seconds = (
        np.array([getattr(s, name) for s in samples], dtype=np.float64)
        for name in names
    )
    # As HardwareProfile counts them.
    rates = np.where(backward, 10, 4) * heads * dims * pairs / seconds
    parameters = {}
    for name, case in zip(_KERNEL, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=False):
        best = rates[(backward == case[0]) & (causal == case[1])].max()
        parameters[name] = (float(best), *_FLOPS)
    shortest = float(seconds.min())
    parameters |= {
        "softmax_head_dims": (8.0, _SMALL, 512.0),
        "forward_row_overhead_keys": (16.0, _SMALL, 4096.0),
        "backward_row_overhead_keys": (16.0, _SMALL, 4096.0),
        "tile_tokens": (128.0, _SMALL, 4096.0),
        "kernel_launch_seconds": (shortest / 2, shortest * 1e-3, shortest),
    }
    call = (heads, dims, rows, pairs * (1 - causal), pairs * causal, parallel_tiles)

    def predict(values: Values) -> Vector:
        numbers = (1, *call, *(values[name] for name in _KERNEL))
        predicted: Vector = np.where(
            backward, _kernel(True)(*numbers), _kernel(False)(*numbers)
        )
        return predicted

    fitted = fit(parameters, predict, seconds)
    values = {k: v if v > 2 * _SMALL else 0.0 for k, v in fitted.values.items()}
    values["kernel_launch_seconds"] = fitted.values["kernel_launch_seconds"]
    return replace(fitted, values=values)


@cache
def _kernel(backward: bool) -> Any:
    """Make a function of arrays from the formula `kernel_seconds`."""
    pairs = rows, dense, triangular = sympy.symbols("rows dense triangular")
    expression = kernel_seconds(rows, dense, triangular, backward)
    expression = expression.subs({symbols.live: 1, symbols.E: symbols.D})
    call = (symbols.B, symbols.h, symbols.D, *pairs, symbols.slots)
    return sympy.lambdify((*call, *_KERNEL.values()), expression, "numpy", cse=True)


def fit_overlap(samples: Sequence[Overlap]) -> float:
    """Return the part of a transfer beside a computation that costs no time, 0 to 1.

    Samples are weighted by what there was to save, against the time of both at once.
    """
    top = below = 0.0
    for transfer, computation, together in samples:
        weight = min(transfer, computation) / together
        top += weight * ((transfer + computation) / together - 1)
        below += weight * weight
    return min(1.0, max(0.0, top / below))


def shared_bridge(samples: Sequence[MessageSample]) -> tuple[float, float]:
    """Find ranks_per_bridge and bridge_bytes_per_second from grouped all-to-alls.

    Groups of 2, 4, ... consecutive ranks that all exchange at once get the same rate
    each, until a group has more ranks than a host bridge: these then share the bridge.

    Returns: (0, 0) if no ranks share one, or if there is only one size of groups.
    """
    rates: dict[int, float] = {}
    by_size = sorted(samples, key=lambda s: s.sent_bytes / max(1, s.ranks - 1))
    for sample in by_size:  # the largest of each group stays
        if sample.kind is TimedExchange.ALL_TO_ALL:
            rates[sample.ranks] = sample.sent_bytes / sample.seconds
    per_bridge, size = min(rates, default=0), max(rates, default=0)
    for ranks, rate in sorted(rates.items()):
        if rate < _ALIKE * max(rates.values()):
            # Of size - 1 messages of a rank, size - per_bridge pass the bridge.
            share = (size - per_bridge) / (size - 1)
            return float(per_bridge), rates[size] * per_bridge * share
        per_bridge = ranks
    return 0.0, 0.0


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
    values: dict[str, Any] = {x: value for x, (value, _) in from_device.items()}
    sources, about = {x: text for x, (_, text) in from_device.items()}, dict(about)
    for source, numbers, curve, fitted in (
        *_computation(samples, values["step_issue_seconds"], values["parallel_tiles"]),
        *_links(samples.messages),
    ):
        if fitted is not None:
            about[f"fit_error_{curve}"] = fitted.summary
            source = f"fitted to {source}: {fitted.summary}"
        values |= numbers
        sources |= dict.fromkeys(numbers, source)
    for name in [x for x in NUMBERS if x not in values]:
        values[name] = getattr(base, name)
        source = base.sources.get(name, "")
        sources[name] = f"not measured; profile {base.name}: {source}"
    return replace(base, name="calibrated", sources=sources, about=about, **values)


def _computation(
    samples: Samples, issue: float, parallel_tiles: float
) -> Iterator[_Found]:
    """Find the numbers of one rank, and how much of a transfer it hides."""
    longer = [s for s in samples.kernels if s.seconds > 1.5 * issue]
    kernels = fit_kernels(longer, parallel_tiles)
    latency = kernels.values.pop("kernel_launch_seconds")
    yield (
        "attention steps by cost.compute.kernel_seconds, forward and backward, "
        f"{_listed(f'{s.rows} x {s.keys}' for s in longer)} tokens, dense and causal, "
        f"head dims {_listed(s.head_dim for s in longer)}",
        *(kernels.values, "attention", kernels),
    )
    launch = {"kernel_launch_seconds": samples.launch}
    yield "measured: copy_ of 64 elements", launch, "", None
    copies = fit_line(samples.copies)
    rate = copies.values["rate"]
    packing = f"packing k and v, {_extent(samples.copies)} bytes read and written"
    yield packing, {"memory_bytes_per_second": rate}, "copies", copies
    merges = {"merge": samples.merges, "backward_merge": samples.backward_merges}
    longest = 0.0
    for name, timed in merges.items():
        if sum(seconds > 0 for _, seconds in timed) < 2:
            continue  # the rest was noise
        line = fit_line(timed)
        longest = max(longest, line.values["latency"])
        yield (
            f"what a later step takes longer than a first one, {_extent(timed)} "
            "elements, as bytes at memory_bytes_per_second",
            {f"{name}_bytes_per_element": rate / line.values["rate"]},
            *(name, line),
        )
    text = "fitted: the latency of an attention step and that of its merge"
    yield text, {"merge_latency_seconds": latency + longest}, "", None
    text = "measured: an attention step on all ranks, over the same on the first alone"
    yield text, {"alone_speedup": samples.alone_speedup}, "", None
    text = "an attention step in the dtype of the rates, over one in this dtype"
    yield f"measured: {text}", samples.speeds, "", None
    if samples.overlaps:
        messages = f"{len(samples.overlaps)} messages beside attention steps"
        hidden = {"overlap_fraction": fit_overlap(samples.overlaps)}
        yield f"fitted to {messages}, against both alone", hidden, "", None


def _links(messages: Sequence[MessageSample]) -> Iterator[_Found]:
    """Find the numbers of links, bridges and cards."""
    near = [s for s in messages if not s.senders]
    per_bridge, bridge = shared_bridge(near)
    if any(s.ranks > 2 for s in near):
        text = "measured: all-to-alls in groups of 2, 4, ... ranks, all at once"
        found = {"ranks_per_bridge": per_bridge, "bridge_bytes_per_second": bridge}
        yield text if per_bridge else f"{text}: they share nothing", found, "", None
    hops = [s for s in near if s.kind is TimedExchange.HOP]
    collectives = [
        s
        for s in near
        if s.kind is not TimedExchange.HOP
        and not (s.kind is TimedExchange.ALL_TO_ALL and s.ranks > per_bridge > 0)
    ]
    near_latency = 0.0
    for curve, group in (("hop", hops), ("collectives", collectives)):
        if group:
            fitted = fit_messages(group)
            near_latency = fitted.values.get("link_latency_seconds", near_latency)
            yield (
                f"{_listed(s.kind.value[0] for s in group)}; "
                f"{_listed(int(s.sent_bytes) for s in group)} bytes sent per rank, "
                f"groups of {_listed(s.ranks for s in group)}",
                *(fitted.values, curve, fitted),
            )
    alone = [s for s in messages if s.senders == 1]
    together = [s for s in messages if s.senders > 1]
    if alone and together:
        single, senders = fit_messages(alone), together[0].senders
        rate = single.values["link_bytes_per_second"]
        beyond = single.values["link_latency_seconds"] - near_latency
        numbers = {
            "inter_node_latency_seconds": max(0.0, beyond),
            "inter_node_bytes_per_second": rate,
        }
        yield "messages between nodes", numbers, "inter_node", single
        part = fit_messages(together).values["link_bytes_per_second"] / rate
        cards = {
            "network_cards_per_node": min(float(senders), max(1.0, part * senders))
        }
        yield (
            f"fitted: {senders} ranks of a node that send at once get {part:.0%} each "
            "of what one alone gets",
            *(cards, "", None),
        )


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(x) for x in dict.fromkeys(items))


def _extent(samples: Sized) -> str:
    sizes = [size for size, _ in samples]
    return f"{min(sizes):.0f} to {max(sizes):.0f}"
