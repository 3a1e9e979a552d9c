"""`cp.plan`: the decision for a call, without the call and without the machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Direction, Latents, Plan, Workload
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout

# All that are worth comparing: fold costs what striped does.
BALANCED_LAYOUTS = (Layout.ZIGZAG, Layout.STRIPED)
AUTO_LAYOUTS = (Layout.CONTIGUOUS, *BALANCED_LAYOUTS)
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def plan(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq: int,
    ranks: int,
    dtype: str = "bfloat16",
    causal: bool = True,
    direction: str = "both",
    hardware: str = "h100",
    ranks_per_node: int | None = None,
    layout: str = "auto",
    memory_budget: float | None = None,
    overrides: Mapping[str, float] | None = None,
    kv_seq: int | None = None,
    value_dim: int | None = None,
    latent_dim: int | None = None,
    relayout: bool = False,
) -> Plan:
    """Compare every strategy for one attention call; needs no GPU and no process group.

    Args:
        batch, heads, kv_heads, head_dim: of q [batch, heads, seq, head_dim] and of k, v
            [batch, kv_heads, kv_seq, head_dim], the whole sequences.
        seq: tokens of the whole sequence. kv_seq: those of k and v, if different.
        value_dim: head dim of v and of the output, if different.
        ranks: number of ranks that share the sequence.
        dtype: "float64", "float32", "bfloat16" or "float16".
        direction: "forward", "backward" or "both".
        hardware: name of a profile, such as "h100", or the path of a .json file.
        ranks_per_node: consecutive ranks that the links inside of a node connect; None
            is what the profile says, 8 for usual servers.
        layout: "contiguous", "zigzag", "striped", "fold", or "auto" for the best.
        memory_budget: extra bytes per rank that a strategy may take; None is all of
            the device's memory.
        overrides: numbers of the profile to replace, by their names, such as
            {"merge_bytes_per_element": 44} for sums made by eager operators.
        latent_dim: numbers per token that k and v of all heads are made of by a linear
            layer, as in multi-head latent attention; None if of nothing narrower.
        relayout: whether a balanced layout has to be made from a contiguous one for
            this call, and undone.

    Returns: a Plan, with `.chosen` and `.candidates`, best first. Each has a strategy,
    degrees, layout, seconds, exposed_seconds, hidden_seconds, wire_bytes (sent per
    rank), peak_extra_bytes, kernels, and excluded, the reason why it is out, or None.

    Raises: ValueError for sizes that are not positive, unknown names, or if every
    strategy is excluded, with the smallest need if that is for memory.
    """
    sizes = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "seq": seq,
        "ranks": ranks,
        "ranks_per_node": 1 if ranks_per_node is None else ranks_per_node,
        "kv_seq": seq if kv_seq is None else kv_seq,
        "value_dim": head_dim if value_dim is None else value_dim,
    }
    if latent_dim is not None:
        sizes["latent_dim"] = latent_dim
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"cp.plan: {name} is {value!r}; needed a positive integer")
    profile = load_profile(hardware)
    if ranks_per_node is not None:
        profile = replace(profile, ranks_per_node=float(ranks_per_node))
    bytes_per_element = BYTES_PER_ELEMENT[
        _one_of("dtype", dtype.removeprefix("torch."), BYTES_PER_ELEMENT)
    ]
    latents = None
    if latent_dim is not None:
        made = kv_heads * (head_dim + sizes["value_dim"])  # numbers per token
        latents = Latents(
            values=1,
            bytes=batch * latent_dim * bytes_per_element,
            flops=2 * batch * latent_dim * made,
            moved=batch * (latent_dim + made) * bytes_per_element,
        )
    workload = Workload(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=seq,
        kv_len=sizes["kv_seq"],
        head_dim=head_dim,
        value_dim=sizes["value_dim"],
        bytes_per_element=bytes_per_element,
        causal=causal,
        direction=Direction(
            _one_of("direction", direction, [d.value for d in Direction])
        ),
        ranks=ranks,
        relayout=relayout,
        latents=latents,
    )
    named = _one_of("layout", layout, ["auto", *(x.value for x in Layout)])
    layouts = AUTO_LAYOUTS if named == "auto" else (Layout(named),)
    try:
        return choose(
            workload,
            profile.with_overrides(overrides or {}),
            layouts=layouts if causal or named != "auto" else (Layout.CONTIGUOUS,),
            memory_budget=memory_budget,
        )
    except RewriteError as error:
        raise ValueError(f"cp.plan: {error}") from error


def _one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Return the value of an argument.

    Raises: ValueError if it is none of the choices.
    """
    if value not in choices:
        needed = ", ".join(choices)
        raise ValueError(f"cp.plan: {name} is {value!r}; needed one of {needed}")
    return value
