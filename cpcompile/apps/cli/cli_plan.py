"""`cpcompile plan`: from arguments to plans, and from plans to text or a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cpcompile.apps.cli import fit_command
from cpcompile.apps.cli.presets import DeltaRules, Preset, find_preset
from cpcompile.cost.mixer_plan import MixerPlan
from cpcompile.cost.mixer_planner import plan_mixers
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.cost.plain_data import to_dict, to_json
from cpcompile.cost.planner import plan
from cpcompile.cost.plans import Plan
from cpcompile.cost.plans.tables import (
    candidate_row,
    milliseconds,
    ranks_text,
    text_table,
    workload_text,
)

_SWEEP_HEADER = (
    *("ranks", "chosen", "ms/layer", "exposed ms", "wire MB", "extra MiB"),
    "runner-up",
)


@dataclass(frozen=True)
class Answer:
    """The plan for a number of ranks, or why there is none."""

    ranks: int
    plan: Plan | None
    error: str | None = None


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print the answers.

    Raises: ValueError for wrong names or sizes.
    """
    if arguments.cp is None:
        raise ValueError("needs --cp (or --gpus), the number of ranks")
    if arguments.seq is None and not arguments.fit:
        raise ValueError("needs --seq, the number of tokens, or --fit")
    preset = _preset(arguments)
    if arguments.fit:
        return fit_command.run(arguments, preset)
    answers = [_answer(arguments, preset, ranks) for ranks in arguments.cp]
    plans = [a.plan for a in answers if a.plan is not None]
    if not plans:
        raise ValueError(answers[0].error)
    mixers = [
        _mixers(preset.delta_rules, p, _name(arguments))
        for p in plans
        if preset.delta_rules is not None
    ]
    if arguments.json:
        single = len(answers) == 1
        attention = plans[0] if single else [_record(a) for a in answers]
        others = mixers[0] if single and mixers else mixers
        print(
            to_json({"attention": attention, "mixers": others} if mixers else attention)
        )
    else:
        lines = _text(arguments, preset, answers, plans[0])
        print("\n".join([*lines, *_mixer_lines(plans, mixers)]))
    if arguments.plot is not None:
        # Numpy and matplotlib are not needed otherwise.
        from cpcompile.reporting.drawing import draw

        titles = {ranks_text(p.workload.ranks): p for p in plans}
        draw(arguments.plot, titles, arguments.memory_budget)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    return 0


def _mixers(rules: DeltaRules, attention: Plan, model: str) -> MixerPlan:
    """Plan the gated delta rules of a model as its attention was planned."""
    call = attention.workload
    shape = MixerShape(
        kind=MixerKind.GATED_DELTA_RULE,
        batch=call.batch,
        tokens=call.q_len,
        key_heads=rules.heads,
        value_heads=rules.heads,
        key_dim=rules.head_dim,
        value_dim=rules.head_dim,
        bytes_per_element=call.bytes_per_element,
    )
    return plan_mixers(
        shape, attention.profile, call.ranks, call.direction, model, rules.layers
    )


def _mixer_lines(plans: list[Plan], mixers: list[MixerPlan]) -> Iterator[str]:
    if not mixers:
        return
    yield ""
    yield "mixers, with ms of each call beyond an even share of its work:"
    for attention, of_mixers in zip(plans, mixers, strict=True):
        yield f"{ranks_text(attention.workload.ranks)}: {of_mixers}"


def _preset(arguments: argparse.Namespace) -> Preset:
    """Return the model that is named or described by its sizes.

    Arguments beside a name replace its sizes. layers is 0 if nothing says their number.
    """
    sizes = {
        name: getattr(arguments, name)
        for name in (
            *("heads", "kv_heads", "head_dim", "value_dim", "latent_dim"),
            *("layers", "causal"),
        )
        if getattr(arguments, name) is not None
    }
    if arguments.model is not None:
        return replace(find_preset(arguments.model), **sizes)
    missing = [
        f"--{n.replace('_', '-')}" for n in ("heads", "head_dim") if n not in sizes
    ]
    if missing:
        raise ValueError(f"needs --model, or {' and '.join(missing)}")
    return Preset(**{"layers": 0, "kv_heads": sizes["heads"]} | sizes)


def _answer(arguments: argparse.Namespace, preset: Preset, ranks: int) -> Answer:
    try:
        chosen_plan = plan(
            batch=arguments.batch,
            heads=preset.heads,
            kv_heads=preset.kv_heads,
            head_dim=preset.head_dim,
            seq=arguments.seq,
            kv_seq=arguments.kv_seq,
            ranks=ranks,
            dtype=arguments.dtype,
            causal=preset.causal,
            direction=arguments.direction,
            hardware=arguments.hardware,
            ranks_per_node=arguments.ranks_per_node,
            layout=arguments.layout,
            memory_budget=arguments.memory_budget,
            value_dim=preset.value_dim,
            latent_dim=preset.latent_dim,
            overrides=dict(arguments.override),
            # Mixers have tokens in their natural order.
            relayout=arguments.relayout or preset.delta_rules is not None,
        )
        return Answer(ranks, chosen_plan)
    except ValueError as error:
        return Answer(ranks, None, str(error).removeprefix("cp.plan: "))


def _record(answer: Answer) -> Any:
    if answer.plan is None:
        return {"ranks": answer.ranks, "error": answer.error}
    return to_dict(answer.plan)


def _text(
    arguments: argparse.Namespace, preset: Preset, answers: list[Answer], first: Plan
) -> list[str]:
    lines = _description(arguments, preset, first)
    if len(answers) > 1:
        lines += ["", text_table([_SWEEP_HEADER, *map(_sweep_row, answers)])]
    for answer in answers:
        if answer.plan is not None and (len(answers) == 1 or arguments.candidates):
            lines += ["", answer.plan.decision_text(preset.layers), answer.plan.table()]
    return lines


def _name(arguments: argparse.Namespace) -> str:
    return arguments.model or "a model described by its sizes"


def _description(
    arguments: argparse.Namespace, preset: Preset, first: Plan
) -> list[str]:
    layers = f", {preset.layers} layers" if preset.layers else ""
    lines = [
        f"{_name(arguments)}{layers}: {workload_text(first.workload)}",
        f"predicted for {first.hardware}, "
        f"{ranks_text(int(first.profile.ranks_per_node))} per node",
    ]
    if preset.windowed_layers:
        lines.append(
            f"not counted: {preset.windowed_layers} more layers with a sliding window "
            f"of {preset.window} tokens"
        )
    return lines


def _sweep_row(answer: Answer) -> tuple[str, ...]:
    if answer.plan is None:
        return (str(answer.ranks), f"none: {answer.error}", "", "", "", "", "")
    chosen = answer.plan.chosen
    row = candidate_row(chosen)
    return (
        str(answer.ranks),
        chosen.label,
        milliseconds(chosen.seconds),
        *(row[4], row[6], row[7]),
        answer.plan.runner_up_text(),
    )
