"""cp::passed_states: the state that the tokens of earlier ranks leave.

    rank r has   B[r], A[r]      what its tokens make of a state: A[r] s + B[r]
              -> s[r]            s[0] = 0, s[r + 1] = A[r] s[r] + B[r]

One all-gather of A and B together, whose size does not depend on the number of tokens;
every rank composes them. The backward gathers the gradients of s[r], and goes back:

    h[last] = grad last,  h[r - 1] = grad s[r] + A[r]' h[r]
    grad B[r] = h[r],     grad A[r] = h[r] s[r]'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.comm.communication import all_gather_chunks, group_by_name


@torch.library.custom_op("cp::passed_states", mutates_args=())
def passed_states(
    part: Tensor, decay: Tensor, mixes: bool, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the state before this rank's tokens, and what the backward needs.

    Args:
        part: B [..], the state that these tokens leave of zeros.
        decay: A, one number per entry of `part`; if `mixes`, a matrix [.., K, K] for
            states [.., K, V].
        mixes: see decay.
        group: name of the process group, whose ranks have the tokens in order.

    Returns: s[r], the state after the tokens of all ranks, A and s of all ranks.

    Raises: torch's error with a note if the exchange fails.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    own = torch.cat([part.reshape(-1), decay.reshape(-1)])
    where = f"cp::passed_states on rank {rank} of {ranks} in group {group!r}"
    gathered = all_gather_chunks(own, pg, where).view(ranks, -1)
    parts, decays = gathered.split([part.numel(), decay.numel()], 1)
    decays = decays.contiguous().view(ranks, *decay.shape)
    states = [torch.zeros_like(part)]
    for other in range(ranks):
        kept = _times(decays[other], states[-1], mixes)
        states.append(kept + parts[other].view(part.shape))
    firsts = torch.stack(states[:-1])
    return firsts[rank].clone(), states[-1], decays, firsts


@passed_states.register_fake
def _(part: Tensor, decay: Tensor, mixes: bool, group: str) -> tuple[Tensor, ...]:
    ranks = group_by_name(group).size()
    return (
        part.new_empty(part.shape),
        part.new_empty(part.shape),
        part.new_empty(ranks, *decay.shape),
        part.new_empty(ranks, *part.shape),
    )


@torch.library.custom_op("cp::passed_states_backward", mutates_args=())
def passed_states_backward(
    grad_first: Tensor,
    grad_last: Tensor,
    decays: Tensor,
    firsts: Tensor,
    mixes: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of B and A of this rank.

    Args:
        grad_first: of s[r].
        grad_last: of the state after all tokens, this rank's summand.
        decays, firsts: A and s of all ranks.
        mixes, group: as for cp::passed_states.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    own = torch.stack([grad_first, grad_last])
    where = f"cp::passed_states_backward on rank {rank} of {ranks} in group {group!r}"
    gathered = all_gather_chunks(own.reshape(-1), pg, where).view(ranks, *own.shape)
    grad = gathered[:, 1].sum(0)
    for other in range(ranks - 1, rank, -1):
        decay = decays[other].mT if mixes else decays[other]
        grad = gathered[other, 0] + _times(decay, grad, mixes)
    first = firsts[rank]
    return grad.contiguous(), grad @ first.mT if mixes else grad * first


@passed_states_backward.register_fake
def _(
    first: Tensor, last: Tensor, decays: Tensor, firsts: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return first.new_empty(firsts.shape[1:]), decays.new_empty(decays.shape[1:])


def _times(decay: Tensor, state: Tensor, mixes: bool) -> Tensor:
    return decay @ state if mixes else decay * state


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.mixes, ctx.group = inputs
    _, _, decays, firsts = output
    ctx.save_for_backward(decays, firsts)


def _gradient(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    decays, firsts = ctx.saved_tensors
    of_first, of_last = (
        firsts.new_zeros(firsts.shape[1:]) if g is None else g for g in grads[:2]
    )
    computed = passed_states_backward(
        of_first, of_last, decays, firsts, ctx.mixes, ctx.group
    )
    return *computed, None, None


passed_states.register_autograd(_gradient, setup_context=_remember)
