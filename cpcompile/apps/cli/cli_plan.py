"""`cpcompile plan`: from arguments to plans, and from plans to text or a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import starmap
from pathlib import Path

from cpcompile.apps.cli import fit_command
from cpcompile.apps.cli.presets import DeltaRules, Preset, find_preset
from cpcompile.cost.mixer_plan import MixerPlan
from cpcompile.cost.mixer_planner import plan_mixers
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.cost.plain_data import to_json
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


Answers = dict[int, Plan | str]
"""For each number of ranks its plan, or why there is none."""


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
    answers = {ranks: _answer(arguments, preset, ranks) for ranks in arguments.cp}
    plans = [answer for answer in answers.values() if isinstance(answer, Plan)]
    if not plans:
        raise ValueError(next(iter(answers.values())))
    mixers = [
        _mixers(preset.delta_rules, p, _name(arguments))
        for p in plans
        if preset.delta_rules is not None
    ]
    if arguments.json:
        single = len(answers) == 1
        every = [
            {"ranks": ranks, "error": x} if isinstance(x, str) else x
            for ranks, x in answers.items()
        ]
        attention = every[0] if single else every
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

        path = Path(arguments.plot)
        titles = {ranks_text(p.workload.ranks): p for p in plans}
        draw(path, titles, arguments.memory_budget)
        print(f"wrote {path}", file=sys.stderr)
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
            *("layers", "causal", "hidden", "feed_forward", "vocabulary"),
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


def _answer(arguments: argparse.Namespace, preset: Preset, ranks: int) -> Plan | str:
    of_model = ("heads", "kv_heads", "head_dim", "value_dim", "latent_dim", "causal")
    of_call = (
        *("batch", "seq", "kv_seq", "dtype", "direction", "hardware"),
        *("ranks_per_node", "layout", "memory_budget"),
    )
    try:
        return plan(
            **{name: getattr(preset, name) for name in of_model},
            **{name: getattr(arguments, name) for name in of_call},
            ranks=ranks,
            overrides=dict(arguments.override),
            # Mixers have tokens in their natural order.
            relayout=arguments.relayout or preset.delta_rules is not None,
        )
    except ValueError as error:
        return str(error).removeprefix("cp.plan: ")


def _text(
    arguments: argparse.Namespace, preset: Preset, answers: Answers, first: Plan
) -> list[str]:
    lines = _description(arguments, preset, first)
    if len(answers) > 1:
        rows = starmap(_sweep_row, answers.items())
        lines += ["", text_table([_SWEEP_HEADER, *rows])]
    for answer in answers.values():
        if not isinstance(answer, str) and (len(answers) == 1 or arguments.candidates):
            lines += ["", answer.decision_text(preset.layers), answer.table()]
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


def _sweep_row(ranks: int, answer: Plan | str) -> tuple[str, ...]:
    if isinstance(answer, str):
        return (str(ranks), f"none: {answer}", "", "", "", "", "")
    chosen = answer.chosen
    row = candidate_row(chosen)
    return (
        str(ranks),
        chosen.label,
        milliseconds(chosen.seconds),
        *(row[4], row[6], row[7]),
        answer.runner_up_text(),
    )
