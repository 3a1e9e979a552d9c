"""Says when torch leaves what is compiled alone, and runs or exports the model itself.

Dynamo does not compile under a TorchDispatchMode, such as CommDebugMode, and runs the
function as it is: on every rank, in whole. It logs that for debugging only, and before
torch 2.15 it never compiles the function afterwards.

torch.export takes the model out of what torch.compile made of it. The exported program
is that of one device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch.export import _trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cpcompile.errors import InputRejected
from cpcompile.logs import warn_once


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
        if "dispatch mode" in reason and _is_ours(self):
            modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
            code = frame.f_code
            warn_once(
                f"{code.co_name} at {code.co_filename}:{code.co_firstlineno} runs in "
                f"eager on every rank: {' and '.join(modes)} is active, under which "
                "torch.compile compiles nothing; call it once before"
            )
            result.apply_to_code = False  # as in torch 2.15: the next call may compile
        return original(self, result, frame)

    wrapper._handle_skip = handle_skip  # type: ignore[method-assign]


def _refuse_export() -> None:
    original = _trace._export

    @functools.wraps(original)
    def export(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, module in mod.named_modules():
            if _is_compiled(module):
                kind = type(getattr(module, "_orig_mod", module)).__name__
                raise InputRejected(
                    f"torch.export: {name or 'the module'} ({kind}) is compiled with "
                    'backend="cp", and would be exported as a program of one device; '
                    "needed the model that was compiled. To compile an exported "
                    'program: torch.compile(exported.module(), backend="cp", ...)'
                )
        return original(mod, *args, **kwargs)

    _trace._export = export


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or module.compile, has compiled a module with "cp"."""
    if isinstance(module, OptimizedModule):
        return _is_ours(getattr(module.dynamo_ctx, "callback", None))
    if _is_ours(module.forward):  # by cp.ContextParallel
        return True
    cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
    contexts = (cell.cell_contents for cell in cells)
    return any(_is_ours(getattr(x, "callback", None)) for x in contexts)


def _is_ours(callback: Any) -> bool:
    """Whether a callback of Dynamo ends in backend "cp"."""
    while callback is not None:
        if getattr(callback, "compiler_name", None) == "cp":
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False
