"""The options of `torch.compile(..., backend="cp", options={...})`, all checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.plans import NAMED_STRATEGIES, Strategy
from cpcompile.errors import OptionError
from cpcompile.geometry.layout import Layout
from cpcompile.settings import (
    BOOL,
    SettingRule,
    is_count,
    is_left_to_us,
    is_positive,
    is_text,
    one_of,
)


class GradSync(Enum):
    """The meaning of a parameter's gradient when the graph hands it over.

    REDUCE: complete, summed over the ranks of the axis inside of the graph.
    NONE: the share of this rank; the sum over the ranks is the gradient.
    AVERAGE: the share times the number of ranks; their mean is the gradient.
    """

    REDUCE = "reduce"
    NONE = "none"
    AVERAGE = "average"


@dataclass(frozen=True)
class Options:
    """The options that the user asked for.

    mesh: the DeviceMesh to shard over; needed when inputs are plain tensors.
    axis: name of the mesh axis that shards the sequence, or names of two axes, the left
        one outside: one of them is called "ulysses", and a hybrid uses it for heads.
    shard: argument name -> dimension of the sequence, for plain inputs.
    strategy: the same strategy for every attention call, or None to choose per call,
        also split_kv where there are fewer queries than ranks and no gradients.
        A name of MixerStrategy is for calls that mix tokens and are no attention;
        {"attention": .., "mixers": ..} is for both.
    mixers: set by `strategy`: the same strategy for all of these, or None.
    layout: how the tokens of causal attention are dealt out to the ranks, or None to
        choose per call: see cpcompile.geometry.layout. The model sees them in order.
    strict: raise for what cannot be proven equal, instead of warning and gathering.
    inner: the compiler that runs the rewritten graph; SHAPES for cp.check alone.
    mode: for Inductor, as torch.compile(mode=...), which takes no options beside it.
    grad_sync: which gradients parameters get. None: what FSDP2 or DDP expects of a
        parameter that it manages, and else "reduce".
    gather_outputs: True: results are plain full tensors. False leaves sharded ones
        DTensors, a number those of more bytes, and None those of more than 256 MiB that
        the model returns.
    outputs: names of the results that are needed, as the model calls them; the others
        are None, and nothing is computed for them alone. None: all of them.
    local_view: set by cp.ContextParallel alone. DTensors enter and leave in the layout
        in which they lie, and gradients are those of a loss that each rank has for
        itself. Without it DTensors and plain tensors are of the whole sequence.
    repeat: None: blocks that repeat, as the layers of a model, become one function for
        Inductor, which compiles it once; False leaves them.
    tile: how many of this rank's tokens a token-wise region runs for at a time, if it
        has large intermediate values, as the logits and the loss. "auto" cuts where
        nothing is computed twice and sizes a tile by its bytes; None never cuts. A
        number cuts every region that gains memory, also a region whose backward
        computes values again.
    activation_memory: what the forward may save for the backward beyond its inputs:
        bytes per rank (int), or a fraction of what it would save (float). The rest is
        computed again. None: no limit.
    offload_activations: what is saved for the backward waits in the memory of the host.
    """

    mesh: DeviceMesh | None = None
    axis: str | tuple[str, str] = "cp"
    shard: Mapping[str, int] = field(default_factory=dict)
    strategy: Strategy | None = None
    mixers: MixerStrategy | None = None
    layout: Layout | None = None
    strict: bool = True
    inner: str = "inductor"
    mode: str | None = None
    grad_sync: GradSync | None = None
    gather_outputs: bool | int | None = None
    outputs: Sequence[str] | None = None
    local_view: bool = False
    repeat: Literal[False] | None = None
    tile: int | Literal[False] | None = None
    activation_memory: int | float | None = None
    offload_activations: bool = False

    def fingerprint(self) -> str:
        """Return a text that is equal on two ranks exactly if their options agree."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        mesh = values["mesh"]
        values["mesh"] = None if mesh is None else (mesh.mesh_dim_names, mesh.shape)
        values["shard"] = sorted(self.shard.items())
        return ", ".join(f"{name}={value}" for name, value in values.items())


def _is_shard_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(dim, int) and not isinstance(dim, bool)
        for name, dim in value.items()
    )


def _is_axis(value: Any) -> bool:
    names = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(
        names
    )


def _is_names(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
    )


def _is_share_or_bytes(value: Any) -> bool:
    return is_positive(value) or (type(value) is float and 0.0 <= value <= 1.0)


_OF_ATTENTION = tuple(s.value for s in NAMED_STRATEGIES)
_OF_MIXERS = tuple(s.value for s in MixerStrategy)


def _is_strategy(value: Any) -> bool:
    return isinstance(value, str) and value in (*_OF_ATTENTION, *_OF_MIXERS)


def _are_strategies(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(x, str | None)
        and x
        in (
            None,
            "auto",
            *{"attention": _OF_ATTENTION, "mixers": _OF_MIXERS}.get(name, ()),
        )
        and name in ("attention", "mixers")
        for name, x in value.items()
    )


def _strategies(value: Any) -> dict[str, Strategy | MixerStrategy]:
    """Return the fields of Options that the option "strategy" says."""
    if isinstance(value, str):
        value = {"attention" if value in _OF_ATTENTION else "mixers": value}
    parsed: dict[str, Strategy | MixerStrategy] = {}
    if not is_left_to_us(value.get("attention")):
        parsed["strategy"] = Strategy(value["attention"])
    if not is_left_to_us(value.get("mixers")):
        parsed["mixers"] = MixerStrategy(value["mixers"])
    return parsed


_RULES = {
    "mesh": SettingRule(lambda v: isinstance(v, DeviceMesh), "a DeviceMesh"),
    "axis": SettingRule(
        _is_axis, "the name of a mesh axis, or a tuple of two names", False
    ),
    "shard": SettingRule(_is_shard_map, "a dict {argument name: dimension}", False),
    "strategy": SettingRule(
        lambda v: _is_strategy(v) or _are_strategies(v),
        f'"auto", {", ".join(map(repr, (*_OF_ATTENTION, *_OF_MIXERS)))}, or a dict '
        '{"attention": .., "mixers": ..} of two of them',
    ),
    "layout": one_of(*(x.value for x in Layout)),
    "strict": BOOL,
    "inner": one_of("inductor", "aot_eager", automatic=False),
    "mode": SettingRule(is_text, "the name of a mode of torch.compile"),
    "grad_sync": one_of(*(x.value for x in GradSync)),
    "gather_outputs": SettingRule(
        lambda v: isinstance(v, bool) or is_count(v),
        '"auto", True, False, or a number of bytes',
    ),
    "outputs": SettingRule(_is_names, '"auto" or a list of names of results'),
    "repeat": SettingRule(lambda v: v is False, '"auto" or False'),
    "tile": SettingRule(
        lambda v: v is False or is_positive(v),
        '"auto", False, or a positive number of tokens',
    ),
    "activation_memory": SettingRule(
        _is_share_or_bytes,
        '"auto", a number of bytes (int), or a fraction from 0.0 to 1.0 (float)',
    ),
    "offload_activations": BOOL,
}
LOCAL_VIEW = "cp.ContextParallel"  # the option by which it says that it calls
CHECKED = "cp.check"  # likewise; its value makes each call's options its own
SHAPES = "shapes"  # the inner compiler of cp.check, which computes nothing
_FORMER = {
    "view": "is gone: needed cp.ContextParallel, which says by itself that tensors are "
    "local",
} | {
    name: f"is a setting: needed cpcompile.config.{name} = ..., or `with "
    f"cpcompile.config.patch({name}=...):` around the call that compiles"
    for name in ("check_ranks", "memory_budget", "profile", "unroll")
}
_ENUMS: dict[str, type[Enum]] = {
    "layout": Layout,
    "grad_sync": GradSync,
}


def parse_options(
    options: Mapping[str, Any] | None, mode: str | None = None
) -> Options:
    """Check options and fill in the defaults.

    Args:
        options: by name. None and "auto" mean the same.
        mode: of torch.compile(mode=...).

    Raises: OptionError for what is no dict, for an unknown name or a wrong value,
    listing what exists.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f'options of backend="cp": got {options!r}; needed a dict, such as '
            '{"mesh": mesh}'
        )
    parsed: dict[str, Any] = {} if mode is None else {"mode": mode}
    for name, value in (options or {}).items():
        if name == LOCAL_VIEW:
            parsed["local_view"] = True
            continue
        if name == CHECKED:
            parsed["inner"] = SHAPES
            continue
        if name in _FORMER:
            raise OptionError(f'option {name!r} of backend="cp" {_FORMER[name]}')
        rule = _RULES.get(name)
        if rule is None:
            nearest = difflib.get_close_matches(str(name), _RULES, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise OptionError(
                f'unknown option {name!r} of backend="cp"{hint} '
                f"The options are: {', '.join(sorted(_RULES))}."
            )
        if not rule.is_met_by(value):
            raise OptionError(
                f'option {name!r} of backend="cp": got {value!r}; needed {rule.needed}.'
            )
        if name == "strategy" and not is_left_to_us(value):
            parsed |= _strategies(value)
        elif not is_left_to_us(value):
            parsed[name] = _ENUMS[name](value) if name in _ENUMS else value
    return Options(**parsed)
