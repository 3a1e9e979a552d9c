"""A recurrence in parts: each rank computes its tokens, and states are passed on.

    rank r      its tokens from a state of zeros      -> B[r], the state that they leave
                its tokens with values of zeros       -> A[r], what is left of a state
    all ranks   cp::passed_states(A[r], B[r])         -> s[r], the true first state
    rank r      its tokens from s[r]                  -> the results

Note [Summaries by the function itself]
A state after some tokens is affine in the state before: s' = A s + B. All of it is
asked of the function, through its arguments for states: B is the state that it leaves
of zeros. Where A mixes rows of the state, it is what the function leaves of the
identity when values are zeros, and one call gives both: values and states get more
columns, which are alike. Else A is one number per entry, what is left of ones.

States are float32, whatever the tokens are. Gradients follow from those of the
function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.mixers.mixer import at_least_float32
from cpcompile.ops.mixers.mixer_call import MixerCall


def passes_states(call: MixerCall) -> bool:
    """Tell whether a call can be made in parts: from zero, of a form that is known."""
    state = call.mixer.state
    if state is None or state.initial in call.names:
        return False
    # The last state would be the same on every rank, and so its gradient.
    if state.result in call.result_names:
        return False
    if state.values[0] not in call.names:
        return False
    # What keeps documents apart counts their tokens from the first one.
    known = call.mixer.names()
    return all(name in known for name in call.names) and not (
        {"seq_idx", "cu_seqlens"} & set(call.names)
    )


def in_parts(call: MixerCall, tensors: Sequence[Tensor], group: str) -> list[Tensor]:
    """Make the call on this rank's tokens, from the state that earlier ranks leave.

    Args:
        tensors: of the call, with the tokens of this rank.
        group: name of the process group, whose ranks have the tokens in order.

    Returns: the results of these tokens.
    """
    arguments = dict(zip(call.names, tensors, strict=True))
    state = call.mixer.state
    assert state is not None, f"{call.function} has no state"
    part, decay = _summary(call, arguments)
    mixes = state.rows is not None
    first, _, _, _ = torch.ops.cp.passed_states(part, decay, mixes, group)
    return _call(call, arguments, first)


def _summary(call: MixerCall, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return B and A of these tokens; Note [Summaries by the function itself]."""
    state = call.mixer.state
    assert state is not None
    no_values = {name: torch.zeros_like(arguments[name]) for name in state.values}
    if state.rows is None:
        part = _last_state(call, arguments, None)
        ones = torch.ones_like(part)
        return part, _last_state(call, arguments | no_values, ones)
    assert state.columns is not None and state.rows == state.columns - 1
    (name,) = state.values
    empty = call.with_final_state().empty_state(arguments)
    rows, columns = empty.shape[state.rows], empty.shape[state.columns]
    values = arguments[name]
    dim = values.ndim - 1
    more = values.new_zeros(*values.shape[:dim], rows)
    wide = arguments | {name: torch.cat([values, more], dim)}
    identity = torch.eye(rows, dtype=empty.dtype, device=values.device)
    first = torch.cat(
        [
            torch.zeros(empty.shape, dtype=empty.dtype, device=values.device),
            identity.expand(*empty.shape[: state.rows], rows, rows),
        ],
        state.columns,
    )
    last = _last_state(call, wide, first)
    part, decay = last.split([columns, rows], state.columns)
    return part, decay


def _last_state(
    call: MixerCall, arguments: dict[str, Tensor], first: Tensor | None
) -> Tensor:
    state = call.mixer.state
    assert state is not None
    asked = call.with_final_state()
    results = _call(asked, arguments, first)
    last = results[asked.result_names.index(state.result)]
    return last.to(at_least_float32(last.dtype))


def _call(
    call: MixerCall, arguments: dict[str, Tensor], first: Tensor | None
) -> list[Tensor]:
    if first is not None:
        state = call.mixer.state
        assert state is not None
        call = call.with_argument(state.initial)
        arguments = arguments | {state.initial: first}
    tensors = [arguments[name] for name in call.names]
    results: Any = torch.ops.cp.mixer(tensors, str(call))
    return list(results)
