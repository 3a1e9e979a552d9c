"""cp::mixer: a call of a function that mixes tokens, as one operator.

Nothing is known of what the function does with its tensors: it runs in eager, with the
kernel that it has. Where a backward follows, `record_mixers` has the forward record it
(cp::mixer_recorded), and the backward uses the record; else it runs the function again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cpcompile.ops.listed_gradients import differentiate
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.ops.mixers.recordings import Recording, recording_of, token_of
from cpcompile.torch_private.fake_tensors import FakeTensorMode, outside_of_operators


@torch.library.custom_op("cp::mixer", mutates_args=())
def mixer(tensors: list[Tensor], call: str) -> list[Tensor]:
    """Make a call of a mixer.

    Args:
        tensors: its tensors, in the order of their names in `call`.
        call: the text of a MixerCall.

    Returns: the results that are tensors, contiguous.

    Raises: RuntimeError if they have other shapes than was said; what the function
    raises.
    """
    with outside_of_operators(), torch.no_grad():
        results = [x.contiguous() for x in MixerCall.of_text(call).run(tensors)]
    return [_own(x, tensors) for x in _checked(call, tensors, results)]


@mixer.register_fake
def _(tensors: list[Tensor], call: str) -> list[Tensor]:
    return _empty(call, tensors)


# A CUDA graph would be replayed without what is recorded.
@torch.library.custom_op(
    "cp::mixer_recorded", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def mixer_recorded(tensors: list[Tensor], needed: list[int], call: str) -> list[Tensor]:
    """Make a call of a mixer, and record it for cp::mixer_backward.

    Args: as for cp::mixer and cp::mixer_backward.

    Returns: the results of cp::mixer; copies of `tensors`, which the backward takes;
    and a token, which it takes, too. What is recorded is freed with the token.
    """
    as_it_is = saved_tensors_hooks(lambda x: x, lambda x: x)  # a checkpoint's stay away
    with outside_of_operators(), torch.enable_grad(), as_it_is:
        leaves = [_copy(x) for x in tensors]
        operands = [x.detach() for x in leaves]
        for i in needed:
            leaves[i].requires_grad_()
        results = MixerCall.of_text(call).run(leaves)
    given = _checked(call, tensors, [_copy(x) for x in results])
    return [*given, *operands, token_of(Recording(leaves, results))]


@mixer_recorded.register_fake
def _(tensors: list[Tensor], needed: list[int], call: str) -> list[Tensor]:
    copies = [x.new_empty(x.shape) for x in tensors]
    token = torch.empty(1, dtype=torch.int64, device="cpu")
    return [*_empty(call, tensors), *copies, token]


def _copy(x: Tensor) -> Tensor:
    """Copy x; see Note [Memory that a compiler writes to] in recordings.py."""
    return x.detach().clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("cp::mixer_backward", mutates_args=())
def mixer_backward(
    grads: list[Tensor],
    tensors: list[Tensor],
    graded: list[int],
    needed: list[int],
    call: str,
    token: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of a call of a mixer.

    They come from what was recorded, or by running the function again: without a token,
    a second time, or if `tensors` were computed again since.

    Args:
        grads: gradients of results.
        tensors: as for cp::mixer.
        graded: the numbers of the results that `grads` are of.
        needed: the numbers of the tensors whose gradients are returned.
        call: as for cp::mixer.
        token: of cp::mixer_recorded.
    """
    recording = None if token is None else recording_of(token, tensors)
    with outside_of_operators(), torch.enable_grad():
        if recording is None:
            leaves = [x.detach() for x in tensors]
            for i in needed:
                leaves[i].requires_grad_()
            recording = Recording(leaves, MixerCall.of_text(call).run(leaves))
        inputs = [recording.operands[i] for i in needed]
        results = recording.results
        outputs = [results[i] for i in graded]
        pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
        assert pairs or not needed, f"{call} has recorded nothing"
        found = torch.autograd.grad(
            [x for x, _ in pairs],
            inputs,
            [g.to(x.dtype) for x, g in pairs],
            allow_unused=True,
        )
    return [
        torch.zeros_like(x) if g is None else _own(g.contiguous(), grads)
        for x, g in zip(inputs, found, strict=True)
    ]


@mixer_backward.register_fake
def _(
    grads: list[Tensor],
    tensors: list[Tensor],
    graded: list[int],
    needed: list[int],
    *rest: Any,
) -> list[Tensor]:
    return [tensors[i].new_empty(tensors[i].shape) for i in needed]


differentiate(mixer, mixer_backward)


def _empty(call: str, tensors: list[Tensor]) -> list[Tensor]:
    results = MixerCall.of_text(call).empty_results(tensors)
    results = [results] if isinstance(results, Tensor) else results
    return [x for x in results if x is not None]


def _own(x: Tensor, others: list[Tensor]) -> Tensor:
    """Return x, in memory of its own: an operator gives new tensors."""
    memory = {y.untyped_storage().data_ptr() for y in others}
    return x.clone() if x.untyped_storage().data_ptr() in memory else x


def _checked(call: str, tensors: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Return results as they are without data.

    Under autocast their dtypes may depend on the number of tokens: what goes through a
    product has another one than what does not.
    """
    promised = _promised(call, tuple((x.shape, x.dtype) for x in tensors))
    if MixerCall.of_text(call).autocast and len(promised) == len(results):
        results = [
            x.to(dtype) if x.is_floating_point() and dtype.is_floating_point else x
            for x, (_, dtype) in zip(results, promised, strict=True)
        ]
    computed = [(x.shape, x.dtype) for x in results]
    if promised != computed:
        raise RuntimeError(
            f"{MixerCall.of_text(call).short_name} returned {_words(computed)}; needed "
            f"{_words(promised)}, as for fewer tokens. Check which dimensions are said "
            "to have the tokens"
        )
    return results


@functools.lru_cache(maxsize=1024)
def _promised(
    call: str, operands: tuple[tuple[torch.Size, torch.dtype], ...]
) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes that results have without data."""
    with FakeTensorMode():
        results = _empty(call, [torch.empty(x, dtype=dtype) for x, dtype in operands])
    return [(x.shape, x.dtype) for x in results]


def _words(tensors: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in tensors)
