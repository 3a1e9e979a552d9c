"""`cp.fit`: find the longest sequence that fits, and what takes the memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.max_sequence.model_memory import (
    EXCHANGING,
    TILE_SHARE,
    Decoder,
    Memory,
    Training,
    memory_of,
)
from cpcompile.cost.planner import BYTES_PER_ELEMENT, plan
from cpcompile.cost.plans import Plan

_GRAIN = 128  # tokens per rank
_MOST = 2**34
_ANY = float(2**63)  # bytes
OFFLOADABLE = ("parameters", "gradients", "optimizer", "checkpoints")


@dataclass(frozen=True)
class Fit:
    """The longest sequence on a number of ranks.

    tokens: of the sequence; 0 if not even the shortest fits. memory: of one rank.
    seconds: of a step, attention and products, without messages of parameters.
    plan: of one attention call.
    """

    ranks: int
    tokens: int
    memory: Memory
    seconds: float
    plan: Plan


def fit(
    model: Decoder,
    *,
    memory: float,
    ranks: int,
    dtype: str = "bfloat16",
    hardware: str = "h100",
    fsdp: bool = False,
    checkpoint: bool = False,
    tile: bool = False,
    offload: Collection[str] = (),
    optimizer_bytes: int | None = None,
) -> Fit:
    """Find the longest sequence of one row with which a training step fits.

    It needs no GPU. Gradients are None before the step, as after
    `optimizer.zero_grad()`.

    Args:
        model: sizes of a decoder with a gated MLP.
        memory: bytes of one rank. ranks: number of ranks that share the sequence.
        dtype: of parameters, gradients and activations.
        hardware: a profile, as for cp.plan.
        fsdp: parameters, gradients and the optimizer are sharded over the ranks.
        checkpoint: the backward computes every layer again.
        tile: MLPs run tile by tile, as the loss does in any case.
        offload: parts that are in the memory of the host, of OFFLOADABLE.
        optimizer_bytes: its state per parameter; None is Adam in float32, with a copy
            of the parameters where these have 16 bits.

    Raises: ValueError for unknown names, and sizes that are not positive.
    """
    if memory <= 0 or ranks < 1:
        raise ValueError(
            f"cp.fit: memory is {memory!r}, ranks {ranks!r}; needed positive numbers"
        )
    if unknown := [x for x in offload if x not in OFFLOADABLE]:
        raise ValueError(
            f"cp.fit: offload has {unknown[0]!r}; needed some of "
            f"{', '.join(OFFLOADABLE)}"
        )
    if dtype not in BYTES_PER_ELEMENT:
        raise ValueError(
            f"cp.fit: dtype is {dtype!r}; needed one of {', '.join(BYTES_PER_ELEMENT)}"
        )
    element = BYTES_PER_ELEMENT[dtype]
    usual = 12 if element == 2 else 2 * element
    how = Training(
        element=element,
        optimizer=usual if optimizer_bytes is None else optimizer_bytes,
        fsdp=fsdp,
        checkpoint=checkpoint,
        tile=tile,
        tile_bytes=int(memory) // TILE_SHARE,
        offloaded=frozenset(offload),
    )

    def planned(tokens: int, budget: float) -> tuple[Memory, Plan]:
        length_plan = plan(
            batch=1,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            seq=tokens * ranks,
            ranks=ranks,
            dtype=dtype,
            hardware=hardware,
            memory_budget=budget,
        )
        extra = float(length_plan.chosen.peak_extra_bytes or 0)
        exchanged = length_plan.chosen.strategy in EXCHANGING
        return memory_of(model, how, tokens, ranks, extra, exchanged), length_plan

    def with_tokens(tokens: int) -> tuple[Memory, Plan]:
        """Plan the fastest attention; what takes less where that does not fit."""
        fastest = planned(tokens, _ANY)
        beyond = fastest[0].total - memory
        if beyond <= 0:
            return fastest
        budget = (fastest[1].chosen.peak_extra_bytes or 0) - beyond
        try:
            return planned(tokens, budget)
        except ValueError:  # nothing takes so little
            return fastest

    low, high = 0, 1
    while high * _GRAIN * ranks < _MOST:
        if with_tokens(high * _GRAIN)[0].total > memory:
            break
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        if with_tokens(middle * _GRAIN)[0].total > memory:
            high = middle
        else:
            low = middle
    tokens = low * _GRAIN
    needed, best_plan = with_tokens(max(tokens, _GRAIN))
    seconds = _seconds(model, how, max(tokens, _GRAIN), best_plan, hardware)
    return Fit(ranks, tokens * ranks, needed, seconds, best_plan)


def _seconds(
    model: Decoder, how: Training, tokens: int, call: Plan, hardware: str
) -> float:
    """Return the seconds of a step: attention by its plan, and products.

    Products run at the rate of attention without a mask.
    """
    profile = load_profile(hardware)
    rate = profile.forward_flops_per_second * profile.speed(how.element)
    weights = model.layers * model.layer_parameters
    passes = 4 if how.checkpoint else 3  # forward, twice backward, forward again
    head = 3 * model.table
    products = 2 * tokens * (passes * weights + head) / rate
    again = 1 + (2 / 7 if how.checkpoint else 0)  # 4 of 14 FLOPs per pair and dim
    attention = call.chosen.seconds
    assert attention is not None, "a plan has chosen what it can time"
    return float(products + model.layers * attention * again)
