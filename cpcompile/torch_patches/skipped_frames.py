"""Says when Dynamo leaves a call alone because a dispatch mode is active.

Dynamo does not compile under a TorchDispatchMode, such as CommDebugMode, and runs the
function as it is: on every rank, in whole. It logs that for debugging only, and before
torch 2.15 it never compiles the function afterwards.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo import convert_frame
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cpcompile.logs import warn_once


@functools.cache
def install() -> None:
    """Warn of such calls of what is compiled with backend "cp"."""
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


def _is_ours(callback: Any) -> bool:
    """Whether a callback of Dynamo ends in backend "cp"."""
    while callback is not None:
        if getattr(callback, "compiler_name", None) == "cp":
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False
