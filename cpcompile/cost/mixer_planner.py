"""`cp.plan_mixer`: how ranks would share a sequence mixer, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cpcompile.cost.hardware.profile import HardwareProfile, load_profile
from cpcompile.cost.mixer_candidates import MixerOnRanks
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_shape_plan import MixerCandidate, MixerShapePlan
from cpcompile.cost.mixer_shapes import KernelWork, MixerKind, MixerShape
from cpcompile.cost.planner import BYTES_PER_ELEMENT, one_of, positive_integers
from cpcompile.cost.plans import Direction

_CALL = "cp.plan_mixer"


def plan_mixer(
    *,
    kind: str,
    seq: int,
    ranks: int,
    value_heads: int,
    value_dim: int,
    key_heads: int | None = None,
    key_dim: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    direction: str = "both",
    hardware: str = "h100",
    ranks_per_node: int | None = None,
    overrides: Mapping[str, float] | None = None,
    strategy: str = "auto",
    work: str = "chunks",
) -> MixerShapePlan:
    """Compare every way to share a sequence mixer that is no softmax attention.

    It needs no GPU and no process group, as cp.plan, and computes by the formulas of
    the compiler.

    Args:
        kind: "gated_delta_rule", "kda", "mamba2", "mamba" or "linear_attention".
        seq: tokens of the whole sequence. ranks: that share it.
        key_heads, key_dim: of the queries and keys of the call; by default those of
            values. For "mamba2" its groups, and numbers of a state ("d_state"); "mamba"
            has one key head, and numbers of a state.
        value_heads, value_dim: of the values; "mamba" has a channel for each product.
        batch, dtype, direction, hardware, ranks_per_node, overrides: as for cp.plan.
        strategy: "exchange", "states" or "gather" forces one; "auto" takes the best.
        work: "chunks": a kernel computes as fast as published ones, as the compiler
            assumes of those of packages; "operands": it reads its operands once.

    Returns: a MixerShapePlan, with `.strategy`, `.chosen` and `.candidates`, best
    first. Each has seconds of the whole call, wire_bytes, and excluded, the reason why
    it is out, or None.

    Raises: ValueError for sizes that are not positive, unknown names, or a forced
    strategy that is not possible, with the reason.
    """
    named = MixerKind(one_of(_CALL, "kind", kind, [k.value for k in MixerKind]))
    if key_heads is None:
        key_heads = 1 if named is MixerKind.MAMBA else value_heads
    sizes = {
        "batch": batch,
        "tokens": seq,
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": value_dim if key_dim is None else key_dim,
        "value_dim": value_dim,
    }
    positive_integers(
        _CALL,
        {("seq" if name == "tokens" else name): n for name, n in sizes.items()}
        | {
            "ranks": ranks,
            "ranks_per_node": 1 if ranks_per_node is None else ranks_per_node,
        },
    )
    _check_heads(named, key_heads, value_heads)
    profile = load_profile(hardware).with_overrides(overrides or {})
    if ranks_per_node is not None:
        profile = replace(profile, ranks_per_node=float(ranks_per_node))
    element = one_of(_CALL, "dtype", dtype.removeprefix("torch."), BYTES_PER_ELEMENT)
    shape = MixerShape(named, bytes_per_element=BYTES_PER_ELEMENT[element], **sizes)
    names = ["auto", *(s.value for s in MixerStrategy)]
    wanted = one_of(_CALL, "strategy", strategy, names)
    return choose_mixer(
        shape,
        profile,
        ranks,
        Direction(one_of(_CALL, "direction", direction, [d.value for d in Direction])),
        KernelWork(one_of(_CALL, "work", work, [w.value for w in KernelWork])),
        None if wanted == "auto" else MixerStrategy(wanted),
    )


def _check_heads(kind: MixerKind, key_heads: int, value_heads: int) -> None:
    if kind is MixerKind.MAMBA and key_heads != 1:
        raise ValueError(
            f"{_CALL}: key_heads is {key_heads} for mamba; needed 1, as all channels "
            "read the same B and C"
        )
    if value_heads % key_heads:
        raise ValueError(
            f"{_CALL}: value_heads is {value_heads}; needed a multiple of key_heads, "
            f"which is {key_heads}"
        )


def choose_mixer(
    shape: MixerShape,
    profile: HardwareProfile,
    ranks: int,
    direction: Direction = Direction.BOTH,
    work: KernelWork = KernelWork.CHUNKS,
    forced: MixerStrategy | None = None,
) -> MixerShapePlan:
    """Compare the strategies for a shape, and choose.

    Raises: ValueError if the forced strategy is not possible.
    """
    call = MixerOnRanks(shape, profile, ranks, direction, work)
    candidates = sorted([call.exchange(), call.states(), call.gather()], key=_rank_of)
    chosen = candidates[0]
    if forced is not None:
        (chosen,) = (c for c in candidates if c.strategy is forced)
        if chosen.excluded is not None:
            raise ValueError(
                f"{_CALL}: strategy {forced.value!r} is not possible for "
                f"{shape.kind.value} on {ranks} ranks: {chosen.excluded}"
            )
    return MixerShapePlan(
        path="",
        name=shape.kind.value,
        strategy=chosen.strategy,
        seconds=tuple(
            (c.strategy, c.beyond_share)
            for c in candidates
            if c.beyond_share is not None
        ),
        dim=chosen.dim,
        forced=forced is not None,
        shape=shape,
        ranks=ranks,
        direction=direction,
        work=work,
        profile=profile,
        candidates=tuple(candidates),
    )


def states_win_from(
    shape: MixerShape,
    profile: HardwareProfile,
    ranks: int,
    direction: Direction = Direction.BOTH,
    work: KernelWork = KernelWork.CHUNKS,
) -> float | None:
    """Return the tokens per rank from which on states are cheaper than an exchange.

    Both prices are a constant and a term for each token. 0 if states are cheaper for
    any length; None if an exchange is cheaper for long sequences, or if one of both is
    not possible.
    """
    few, many = 2**10, 2**20
    gaps = []
    for per_rank in (few, many):
        longer = replace(shape, tokens=per_rank * ranks)
        plan = choose_mixer(longer, profile, ranks, direction, work)
        prices = dict(plan.seconds)
        if not {MixerStrategy.STATES, MixerStrategy.EXCHANGE} <= set(prices):
            return None
        gaps.append(prices[MixerStrategy.STATES] - prices[MixerStrategy.EXCHANGE])
    per_token = (gaps[1] - gaps[0]) / (many - few)
    if per_token >= 0:
        return None
    return max(0.0, few - gaps[0] / per_token)


def _rank_of(candidate: MixerCandidate) -> tuple[bool, float, str]:
    beyond = candidate.beyond_share
    return beyond is None, beyond or 0.0, candidate.strategy.value
