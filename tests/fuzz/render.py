"""A program as Python: a model, what makes its inputs, and how it is compiled."""

from __future__ import annotations

from tests.fuzz.kinds import KINDS
from tests.fuzz.program import Program
from tests.fuzz.site import Scope, Sheet, class_text, write_statement

HEAD = '''\
"""Seed {seed}: {setting}."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
'''

INPUTS = '''\
def inputs(length, batch={batch}):
    """Arguments of forward."""
    made = {{
{lines}
    }}
    return {{
        name: x.to(torch.{dtype}).detach().requires_grad_(x.requires_grad)
        if x.is_floating_point()
        else x
        for name, x in made.items()
    }}'''


def render(program: Program) -> str:
    """The text of a module with Model, inputs and the choices of the program."""
    setting = program.setting
    sheet, scope = Sheet(setting, KINDS), Scope()
    for statement in (*program.sources, *program.statements):
        write_statement(sheet, scope, statement)
    losses = [write_statement(sheet, scope, x).text for x in program.losses]
    result = " + ".join(losses)
    if program.returned:
        values = ", ".join(sheet.values[name].text for name in program.returned)
        result = f"{result}, {values}"
    parts = [
        HEAD.format(seed=program.seed, setting=setting),
        *sheet.helpers,
        class_text("Model", scope, list(sheet.inputs), result),
        _inputs(sheet),
        _facts(program, sheet),
    ]
    return "\n\n\n".join(parts) + "\n"


def _inputs(sheet: Sheet) -> str:
    lines = [
        f'        "{name}": {expression},'
        for name, (expression, _) in sheet.inputs.items()
    ]
    setting = sheet.setting
    return INPUTS.format(
        batch=setting.batch, lines="\n".join(lines), dtype=setting.dtype
    )


def _facts(program: Program, sheet: Sheet) -> str:
    setting = program.setting
    shard = {name: dim for name, (_, dim) in sheet.inputs.items() if dim is not None}
    return "\n".join(
        [
            f"WORLD, LENGTHS, DTYPE = {setting.world}, {setting.lengths}, "
            f"torch.{setting.dtype}",
            f"BATCH, GROWTH = {setting.batch}, {setting.growth}",
            f"DOOR, MODE, DYNAMIC = {setting.door!r}, {setting.mode!r}, "
            f"{setting.dynamic}",
            f"OPTIONS, SETTINGS = {setting.options()}, {setting.settings()}",
            f"SHARD = {shard}  # the dimension of the sequence",
            f"DRAWN = {sheet.drawn}  # random numbers while it runs",
        ]
    )
