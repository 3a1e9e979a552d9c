"""The options of `torch.compile(..., backend="cp", options={...})`, all checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.plans import NAMED_STRATEGIES, Strategy
from cpcompile.errors import OptionError
from cpcompile.geometry.layout import Layout
from cpcompile.settings import (
    BOOL,
    SettingRule,
    is_count,
    one_of,
    setting,
    setting_names,
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
    """The options that the user asked for; None where a choice is left to us.

    mesh: the DeviceMesh to shard over; needed when inputs are plain tensors.
    axis: name of the mesh axis that shards the sequence, or names of two axes, the left
        one outside: one of them is called "ulysses", and a hybrid uses it for heads.
    shard: argument name -> dimension of the sequence, for plain inputs.
    strategy: the same strategy for every attention call, or None to choose per call,
        also split_kv where there are fewer queries than ranks and no gradients.
    mixers: the same strategy for all calls that mix tokens and are no attention; the
        option "strategy" names either or both, separated by a comma.
    layout: how the tokens of causal attention are dealt out to the ranks, or None to
        choose per call: see cpcompile.geometry.layout. The model sees them in order.
    strict: raise for what cannot be proven equal, instead of warning and gathering.
    inner: the compiler that runs the rewritten graph.
    grad_sync: which gradients parameters get. None: what FSDP2 or DDP expects of a
        parameter that it manages, and else "reduce".
    tile: how many of this rank's tokens a token-wise region runs for at a time, if it
        has large intermediate values, as the logits and the loss. None cuts where
        nothing is computed twice and sizes a tile by its bytes; 0 never cuts. A number
        cuts every region that gains memory, also a region whose backward computes
        values again.
    activation_memory: what the forward may save for the backward beyond its inputs: up
        to 1.0 a fraction of what it would save, above it bytes per rank. The rest is
        computed again. None: no limit.

    The other fields are no options. mode: of torch.compile(mode=...), for Inductor.
    local_view: cp.ContextParallel calls. DTensors enter and leave in the layout in
    which they lie, and gradients are those of a loss that each rank has for itself.
    Without it DTensors and plain tensors are of the whole sequence.
    computes: False for cp.check, whose programs return zeros.
    """

    mesh: DeviceMesh | None = None
    axis: str | tuple[str, str] = "cp"
    shard: Mapping[str, int] = field(default_factory=dict)
    strategy: Strategy | None = None
    mixers: MixerStrategy | None = None
    layout: Layout | None = None
    strict: bool = True
    inner: str = "inductor"
    grad_sync: GradSync | None = None
    tile: int | None = None
    activation_memory: float | None = None
    mode: str | None = None
    local_view: bool = False
    computes: bool = True

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


def _is_share_or_bytes(value: Any) -> bool:
    is_number = type(value) in (int, float) and math.isfinite(value)
    return is_number and (value > 1 or (type(value) is float and value >= 0.0))


_OF_ATTENTION = tuple(s.value for s in NAMED_STRATEGIES)
_OF_MIXERS = tuple(s.value for s in MixerStrategy)


def _is_strategy(value: Any) -> bool:
    names = _names(value) if isinstance(value, str) else ["no text"]
    known = all(name in ("auto", *_OF_ATTENTION, *_OF_MIXERS) for name in names)
    return known and all(
        sum(name in names_of_one for name in names) <= 1
        for names_of_one in (_OF_ATTENTION, _OF_MIXERS)
    )


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _optional(accepts: Callable[[Any], bool], needed: str) -> SettingRule:
    return SettingRule(
        lambda v: v is None or accepts(v), f"None or {needed}", automatic=False
    )


def _one_of(*choices: str) -> SettingRule:
    return one_of("auto", *choices, automatic=False)


_RULES = {
    "mesh": _optional(lambda v: isinstance(v, DeviceMesh), "a DeviceMesh"),
    "axis": SettingRule(
        _is_axis, "the name of a mesh axis, or a tuple of two names", False
    ),
    "shard": SettingRule(_is_shard_map, "a dict {argument name: dimension}", False),
    "strategy": SettingRule(
        _is_strategy,
        f"one of 'auto', {', '.join(map(repr, (*_OF_ATTENTION, *_OF_MIXERS)))}, or "
        "one of attention and one of mixers: 'ring, states'",
        False,
    ),
    "layout": _one_of(*(x.value for x in Layout)),
    "strict": BOOL,
    "inner": one_of("inductor", "aot_eager", automatic=False),
    "grad_sync": _one_of(*(x.value for x in GradSync)),
    "tile": _optional(is_count, "a number of tokens, 0 for never"),
    "activation_memory": _optional(
        _is_share_or_bytes, "a fraction from 0.0 to 1.0, or a larger number of bytes"
    ),
}
_ENUMS: dict[str, type[Enum]] = {
    "layout": Layout,
    "grad_sync": GradSync,
}


def parse_options(
    options: Mapping[str, Any] | None, mode: str | None = None, **internal: bool
) -> Options:
    """Check options and fill in the defaults.

    Args:
        options: by name.
        mode: of torch.compile(mode=...), which takes no options beside it; with them
            it is the setting inductor_mode.
        internal: the fields `local_view` and `computes`.

    Raises: OptionError for what is no dict, for an unknown name or a wrong value,
    listing what exists.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f'options of backend="cp": got {options!r}; needed a dict, such as '
            '{"mesh": mesh}'
        )
    parsed: dict[str, Any] = {"mode": mode or setting("inductor_mode"), **internal}
    for name, value in (options or {}).items():
        rule = _RULES.get(name)
        if rule is None:
            raise OptionError(f'unknown option {name!r} of backend="cp"{_hint(name)}')
        if not rule.is_met_by(value):
            raise OptionError(
                f'option {name!r} of backend="cp": got {value!r}; needed {rule.needed}.'
            )
        if name == "strategy":
            for strategy in _names(value):
                if strategy in _OF_ATTENTION:
                    parsed["strategy"] = Strategy(strategy)
                elif strategy in _OF_MIXERS:
                    parsed["mixers"] = MixerStrategy(strategy)
        elif name in _ENUMS:
            parsed[name] = None if value == "auto" else _ENUMS[name](value)
        else:
            parsed[name] = value
    if not internal.get("computes", True):
        parsed["inner"] = "aot_eager"
    return Options(**parsed)


def _hint(name: Any) -> str:
    """Say where an unknown name belongs, what it may be, and what there is."""
    if name in setting_names():
        return (
            f": it is a setting, cpcompile.config.{name} = ..., or `with "
            f"cpcompile.config.patch({name}=...):` around the call that compiles"
        )
    nearest = difflib.get_close_matches(str(name), _RULES, n=1)
    question = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"{question} The options are: {', '.join(sorted(_RULES))}."
