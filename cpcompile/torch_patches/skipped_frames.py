"""Warn when torch leaves what is compiled alone; refuse to let it export such a model.

Dynamo does not compile under a TorchDispatchMode, such as CommDebugMode, and runs the
function as it is: on every rank, in whole. It logs that for debugging only, and before
torch 2.15 it never compiles the function afterwards.

Nor does it compile a function that it cannot leave and enter again where the graph
breaks, as in a loop: it runs that function in eager, and compiles what it calls one by
one. With attention that is not compiled, the backend is never called. Seen in torch
2.13, which says no more than that an error was suppressed.

Nor does it compile a function that has as many programs as its limit. It logs a warning
of its own, but not that the whole sequence is computed on every rank from then on.

torch.export takes the model out of what torch.compile made of it. The exported program
is that of one device.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
from collections import Counter
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import OptimizedModule, _debug_get_cache_entry_list
from torch._dynamo.guards import get_and_maybe_log_recompilation_reasons
from torch._dynamo.types import FrameAction
from torch.export import _trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cpcompile import errors
from cpcompile.errors import InputError, RecompileLimitError
from cpcompile.logs import warn_once, warn_unsharded
from cpcompile.torch_patches.graph_breaks import breaks, is_ours, reason_text

_TORCH_OR_OURS = tuple(
    str(pathlib.Path(str(module.__file__)).parent) + os.sep
    for module in (torch, errors)
)

# What a guard is on: self.weight, or x.size()[0], but no function such as len.
_VALUE = r"(?<![\w.])(?!tensor\b)[A-Za-z_]\w*\b(?!\()(?:\.\w+(?:\(\))?|\[[^\]]*\])*"

# Code of which graphs are sharded, and whether their options are strict.
sharded: WeakKeyDictionary[CodeType, bool] = WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Warn of such calls of what is compiled with backend "cp"; refuse to export it."""
    _refuse_export()
    wrapper = convert_frame.CatchErrorsWrapper
    original = getattr(wrapper, "_handle_skip", None)
    if original is None:  # another torch: no warning
        return

    @functools.wraps(original)
    def handle_skip(self: Any, result: Any, frame: Any) -> Any:
        reason = getattr(result, "skip_reason", None) or ""
        if "dispatch mode" in reason and is_ours(self):
            modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
            why = f"torch.compile compiles nothing under {' and '.join(modes)}"
            warn_unsharded(_place(frame.f_code), f"{why}; call it once before")
            result.apply_to_code = False  # as in torch 2.15: the next call may compile
        elif "error was suppressed" in reason and is_ours(self):
            _warn_about_break(frame.f_code)
        elif _is_at_limit(result) and is_ours(self) and frame.f_code in sharded:
            text = _past_the_limit(frame)
            if sharded[frame.f_code]:
                raise RecompileLimitError(text)
            warn_once(text)
        return original(self, result, frame)

    wrapper._handle_skip = handle_skip  # type: ignore[method-assign]


def _warn_about_break(code: CodeType) -> None:
    """Warn about a break in a function that the user calls.

    Other functions run where another graph breaks.
    """
    if code.co_filename.startswith(_TORCH_OR_OURS) or called_by_user_code():
        return
    lines = {line for *_, line in code.co_lines()}
    inside = [
        f" (line {line}: {reason_text(x.text)})"
        for x in breaks()
        for file, line in x.places
        if file == code.co_filename and line in lines
    ]
    at = inside[-1] if inside else ""
    warn_once(
        f"{_place(code)} runs in eager on every rank: its graph breaks{at} where "
        "torch.compile cannot go on, as in a loop or a `with`. What it calls is "
        "compiled one by one and gathered in between, and attention in functions that "
        "are not compiled runs in whole on every rank; remove the break "
        "(torch.compile(..., fullgraph=True) says where it is), or compile the modules "
        "in the loop themselves"
    )


def _place(code: CodeType) -> str:
    return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"


def _is_at_limit(result: Any) -> bool:
    """Tell whether Dynamo runs a function as it is from now on; its only cause."""
    strategy = getattr(result, "frame_exec_strategy", None)
    return getattr(strategy, "cur_action", None) == FrameAction.RUN_ONLY


def _past_the_limit(frame: Any) -> str:
    """Say what would run in eager, and which value has made most of its programs."""
    code = frame.f_code
    programs = _debug_get_cache_entry_list(code)
    reasons = get_and_maybe_log_recompilation_reasons(programs, frame, is_ours, True)
    # Such as "0/7: L['self'].weight == 0.35  # loss + self.weight * ..."
    guards = [text.partition(": ")[2].partition("  #")[0].strip() for text in reasons]
    guards = [re.sub(r"[LG]\['(\w+)'\]", r"\1", guard) for guard in guards]
    values = [x for guard in guards for x in re.findall(_VALUE, guard)[:1]]
    changed = ""
    if values:
        ((value, count),) = Counter(values).most_common(1)
        last = next(guard for guard in guards if value in guard)
        changed = f"; what changed most is {value}, in {count} of them (last: {last})"
    return (
        f"{_place(code)} runs in eager, unsharded, on every rank from now on: it has "
        f"{len(programs)} programs, the limit of torch.compile, and needs another one"
        f"{changed}. Pass a number that "
        "changes as a 0-dim tensor, pad inputs to a few sizes, or raise "
        "torch._dynamo.config.recompile_limit"
    )


def called_by_user_code() -> bool:
    """Tell whether the frame being compiled was called from outside of torch.

    What the user calls is entered through torch.compile's own wrapper.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_OR_OURS):
        if frame.f_code.co_name == "compile_wrapper":
            return False
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return frame is not None


def _refuse_export() -> None:
    original = _trace._export

    @functools.wraps(original)
    def export(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, module in mod.named_modules():
            if _is_compiled(module):
                kind = type(getattr(module, "_orig_mod", module)).__name__
                raise InputError(
                    f"torch.export: {name or 'the module'} ({kind}) is compiled with "
                    'backend="cp", and would be exported as a program of one device; '
                    "needed the model that was compiled. To compile an exported "
                    'program: torch.compile(exported.module(), backend="cp", ...)'
                )
        return original(mod, *args, **kwargs)

    _trace._export = export


def _is_compiled(module: nn.Module) -> bool:
    """Tell whether torch.compile or module.compile has compiled a module with "cp"."""
    if isinstance(module, OptimizedModule):
        return is_ours(getattr(module.dynamo_ctx, "callback", None))
    if is_ours(module.forward):  # by cp.ContextParallel
        return True
    cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
    contexts = (cell.cell_contents for cell in cells)
    return any(is_ours(getattr(x, "callback", None)) for x in contexts)
