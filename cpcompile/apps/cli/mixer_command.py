"""The part of `cpcompile plan` for layers that are no softmax attention."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from cpcompile.apps.cli.presets import MixerLayers, Preset
from cpcompile.cost.mixer_planner import plan_mixer
from cpcompile.cost.mixer_shape_plan import MixerShapePlan, shape_text
from cpcompile.cost.plans import Plan
from cpcompile.cost.plans.tables import duration, milliseconds, ranks_text, text_table

_SWEEP_HEADER = ("ranks", "chosen", "ms/layer", "wire MB", "runner-up", "ms of all")
_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim")


@dataclass(frozen=True)
class MixerAnswer:
    """The plan of a model's mixers for a number of ranks, beside that of attention.

    attention_layers: each with the time of `attention`, None if nothing is possible.
    """

    ranks: int
    plan: MixerShapePlan
    layers: int
    attention: Plan | None = None
    attention_layers: int = 0

    @property
    def seconds(self) -> float | None:
        """Seconds of all layers; None if one has none, or their number is unknown."""
        seconds = self.plan.chosen.seconds
        if not self.layers or seconds is None:
            return None
        if not self.attention_layers:
            return self.layers * seconds
        if self.attention is None or self.attention.chosen.seconds is None:
            return None
        of_attention = self.attention_layers * self.attention.chosen.seconds
        return self.layers * seconds + of_attention


def mixer_layers(
    arguments: argparse.Namespace, preset: Preset | None
) -> MixerLayers | None:
    """Return the mixers that are named or described; None if there are none.

    Raises: ValueError for sizes without a kind, and a kind without sizes.
    """
    asked = {name: getattr(arguments, f"mixer_{name}") for name in (*_SIZES, "layers")}
    sizes = {name: n for name, n in asked.items() if n is not None}
    if preset is not None and preset.mixer is not None:
        kind = arguments.mixer or preset.mixer.kind
        return replace(preset.mixer, kind=kind, **sizes)
    if arguments.mixer is None:
        if sizes:
            raise ValueError("sizes of a mixer need --mixer, such as gated_delta_rule")
        return None
    missing = [n for n in ("value_heads", "value_dim") if n not in sizes]
    if missing:
        flags = " and ".join(f"--mixer-{n.replace('_', '-')}" for n in missing)
        raise ValueError(f"--mixer needs {flags}")
    return MixerLayers(kind=arguments.mixer, **sizes)


def answer(
    arguments: argparse.Namespace,
    mixer: MixerLayers,
    ranks: int,
    attention: Plan | None = None,
    attention_layers: int = 0,
) -> MixerAnswer:
    """Plan the mixers for a number of ranks.

    Raises: ValueError for wrong names or sizes.
    """
    plan = plan_mixer(
        kind=mixer.kind,
        batch=arguments.batch,
        seq=arguments.seq,
        ranks=ranks,
        key_heads=mixer.key_heads,
        value_heads=mixer.value_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        dtype=arguments.dtype,
        direction=arguments.direction,
        hardware=arguments.hardware,
        ranks_per_node=arguments.ranks_per_node,
        overrides=dict(arguments.override),
        work=arguments.mixer_work,
    )
    return MixerAnswer(ranks, plan, mixer.layers, attention, attention_layers)


def lines(answers: list[MixerAnswer], candidates: bool) -> list[str]:
    """Write the plans for people; candidates: also those of a sweep."""
    first = answers[0].plan
    layers = f"{answers[0].layers} layers of " if answers[0].layers else ""
    nodes = ranks_text(int(first.profile.ranks_per_node))
    text = [
        f"{layers}{shape_text(first.shape, first.direction)}",
        f"predicted for {first.hardware}, {nodes} per node; {first.work_text}",
    ]
    if len(answers) > 1:
        text += ["", text_table([_SWEEP_HEADER, *map(_sweep_row, answers)])]
    for each in answers:
        if len(answers) == 1 or candidates:
            text += ["", each.plan.decision_text(each.layers), each.plan.table()]
    seconds, others = answers[0].seconds, answers[0].attention_layers
    if len(answers) == 1 and others and seconds is not None:
        text += ["", f"all {answers[0].layers + others} layers: {duration(seconds)}"]
    return text


def _sweep_row(each: MixerAnswer) -> tuple[str, ...]:
    chosen = each.plan.chosen
    return (
        str(each.ranks),
        chosen.strategy.value,
        milliseconds(chosen.seconds),
        f"{(chosen.wire_bytes or 0) / 1e6:.1f}",
        each.plan.runner_up_text(),
        milliseconds(each.seconds),
    )
