"""Calls of every cp:: operator, of which the operands are tensors to be rearranged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cpcompile as cp
import cpcompile.ops  # registers the operators
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.token_pieces import assigned
from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.step_arguments import RingPlace, StepChunk
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.cpu.attention_cases import sequence_mesh
from tests.support.attention_calls import rest as rest_of
from tests.support.attention_calls import rest_of_local, spec_and_extras

B, H, G, D, E = 2, 4, 2, 8, 6
LENGTH = 13  # uneven on several ranks
SCALE = 0.3
ops = torch.ops.cp


@dataclass(frozen=True)
class Call:
    """One call: `run(*operands)`, whose tensors may lie in memory in any order.

    names: the operators that it calls. has_fake: whether it is one operator with a fake
    implementation, whose strides are promised. masked: whether it has a mask.
    """

    names: tuple[str, ...]
    run: Callable[..., Any]
    operands: tuple[Any, ...]
    has_fake: bool = True
    masked: bool = False

    @property
    def name(self) -> str:
        return " ".join(self.names) + (" under a mask" if self.masked else "")


def registered() -> set[str]:
    """The names of all operators of cp::, without the namespace."""
    every = torch._C._dispatch_get_all_op_names()
    return {x.removeprefix("cp::") for x in every if x.startswith("cp::")}


@dataclass(frozen=True)
class Place:
    """This rank's place in its group."""

    rank: int
    ranks: int
    group: str

    def chunk(self, x: Tensor, dim: int = 2) -> Tensor:
        """This rank's part of x."""
        size = -(-x.shape[dim] // self.ranks)
        start = min(size * self.rank, x.shape[dim])
        return x.narrow(dim, start, min(size, x.shape[dim] - start)).contiguous()


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """All of them, with equal numbers in every dtype and on every rank."""
    mesh = sequence_mesh(dist.get_world_size())
    pg = mesh.get_group()
    place = Place(pg.rank(), pg.size(), pg.group_name)
    yield from _steps(dtype)
    yield from _sequences(place, dtype)
    yield from _masked(place, dtype)
    yield from _composites(place, mesh, dtype)
    yield from _messages(place, dtype)
    yield from _states(place, dtype)
    yield from _mixers(dtype)
    yield from _others(dtype)


def _states(place: Place, dtype: torch.dtype) -> Iterator[Call]:
    """States [B, H, K, V] with a number for each entry, and with a matrix [K, K]."""
    part, grad_first, grad_last, decay, matrix = _random(
        dtype, *[(B, H, 3, 4)] * 4, (B, H, 3, 3)
    )
    for mixes, kept in ((False, decay), (True, matrix)):
        rest = (mixes, place.group)
        operands = (part + place.rank, kept, *rest)
        yield Call(("passed_states",), ops.passed_states, operands)
        _, _, decays, firsts = ops.passed_states(*operands)
        grads = (grad_first, grad_last, decays, firsts, *rest)
        name = "passed_states_backward"
        yield Call((name,), ops.passed_states_backward, grads)


def running(x: Tensor, gate: Tensor) -> Tensor:
    """s[t] = gate[t] s[t - 1] + x[t]: [B, S, D]."""
    state, results = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = gate[:, i] * state + x[:, i]
        results.append(state)
    return torch.stack(results, 1)


def _mixers(dtype: torch.dtype) -> Iterator[Call]:
    """A recurrence, which is called by its name."""
    x, gate, grad = _random(dtype, *[(B, LENGTH, D)] * 3)
    names = ("x", "gate", "return")
    cp.register_mixer(
        running,
        tokens=dict.fromkeys(names, 1),
        independent={"channels": dict.fromkeys(names, 2)},
    )
    call, tensors = MixerCall.of(running, (x, gate), {})
    text, rest = str(call), ([0], [0, 1])

    def mixed(tensors: list[Tensor]) -> list[Tensor]:
        return ops.mixer(tensors, text)

    def recorded(tensors: list[Tensor]) -> list[Tensor]:
        # The last result is the number of the recording.
        return ops.mixer_recorded(tensors, rest[1], text)[:-1]

    def backward(grads: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        return ops.mixer_backward(grads, tensors, *rest, text)

    yield Call(("mixer",), mixed, (tensors,))
    yield Call(("mixer_recorded",), recorded, (tensors,))
    yield Call(("mixer_backward",), backward, ([grad], tensors))


def _others(dtype: torch.dtype) -> Iterator[Call]:
    def added(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        total = total.clone(memory_format=torch.contiguous_format)
        ops.add_product_(total, a, b)
        return total

    operands = tuple(_random(dtype, (5, 3), (5, 4), (4, 3)))
    yield Call(("add_product_",), added, operands)
    yield Call(("gradient_bucket",), ops.gradient_bucket, (operands,))
    experts = torch.tensor([[2, 0, 1], [1, 1, 0]])
    yield Call(("expert_numbers",), ops.expert_numbers, (experts, "a test"))
    x, *sums = _random(dtype, (4, 2), (2,), (3,))
    yield Call(("after",), ops.after, (x, sums))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    for by_token in (False, True):
        operands = (mask, mask.numel(), False, by_token, "a test")
        yield Call(("row_numbers",), ops.row_numbers, operands)


def _random(dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(*x, generator=generator).to(dtype) for x in shapes]


def _qkv(dtype: torch.dtype, tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    shapes = ((B, H, tokens, D), (B, G, tokens, D), (B, G, tokens, E))
    return _random(dtype, *shapes, (B, H, tokens, E))


def _steps(dtype: torch.dtype) -> Iterator[Call]:
    """The kernels that compute, with what they accumulate to."""
    q, k, v, grad = _qkv(dtype, 9)
    (out,) = _random(dtype, grad.shape)
    sums = accumulation_dtype(dtype)
    lse, dq, dk, dv = _random(sums, (B, H, 9), q.shape, k.shape, v.shape)
    for kernel in ("aten_flash", "aten_math"):
        for visible in (ALL, Visible(upper=(1, 1))):
            told = StepChunk.plain(SCALE, visible).arguments()
            rest = (*told, True, kernel, v)
            operands = (q, k, v, out.to(sums), lse, *rest)
            yield Call(("attention_step",), ops.attention_step, operands)
            for parts, rows, before in (
                ("all", out, [dq]),
                ("dkdv", lse, [dk, dv]),
                ("dq", lse, [dq]),
            ):
                saved = (grad, q, k, v, lse.abs() + 2, rows, before, parts, *rest)
                operator = ops.attention_step_backward
                yield Call(("attention_step_backward",), operator, saved)


def _forward_and_backward(
    name: str,
    operands: tuple[Any, ...],
    grad: Tensor,
    rest: tuple[Any, ...],
    *more: Any,
    masked: bool = False,
) -> Iterator[Call]:
    """rest: of both. more: of the backward."""
    forward, backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    yield Call((name,), forward, (*operands, *rest), masked=masked)
    out, lse = forward(*operands, *rest)
    saved = (grad, *operands, out, lse, *rest, *more)
    yield Call((f"{name}_backward",), backward, saved, masked=masked)


def _sequences(place: Place, dtype: torch.dtype) -> Iterator[Call]:
    *qkv, grad = map(place.chunk, _qkv(dtype, LENGTH))
    for name, layout in (
        ("ring_attention", "contiguous"),
        ("ring_attention", "zigzag"),
        ("all_gather_attention", "contiguous"),
        ("all_gather_attention", "zigzag"),
    ):
        rest = rest_of(LENGTH, LENGTH, True, SCALE, place.group, layout=layout)
        yield from _forward_and_backward(name, tuple(qkv), grad, rest, False, None)


def _masked(place: Place, dtype: torch.dtype) -> Iterator[Call]:
    whole = _qkv(dtype, LENGTH)
    row = torch.arange(LENGTH)
    key_ranges = torch.stack([(row - 4).clamp(min=0), row + 1], -1).expand(B, -1, -1)
    ids = (row // 5).expand(B, -1)
    (bias,) = _random(dtype, (B, H, LENGTH, LENGTH))
    ids = ids.contiguous()
    limits = {
        "key_ranges": key_ranges.contiguous(),
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
    }
    masks: dict[str, Tensor] = {"bias": bias, **limits}
    *qkv, grad = whole
    seeds, sinks = torch.arange(B * H).view(B, H), *_random(dtype, (H,))
    changed = {"softcap": 2.0, "dropout_p": 0.25, "seeds": seeds, "sinks": sinks}
    for changes in ({}, changed):
        rest = rest_of_local(SCALE, **masks, **changes)
        call = ("local_attention", tuple(qkv), grad, rest, True, None)
        yield from _forward_and_backward(*call, masked=True)
    (of_distances,) = _random(dtype, (B, H, 2 * LENGTH - 1))
    by_distance = {**limits, "bias": of_distances}
    rest = rest_of_local(SCALE, **by_distance)
    call = ("local_attention", tuple(qkv), grad, rest, True, None)
    yield from _forward_and_backward(*call, masked=True)
    q, *keys = (whole[0], *map(place.chunk, whole[1:3]))
    lengths = (LENGTH, LENGTH, False, SCALE, place.group)
    for given in (masks, by_distance, limits, {}):
        for changes in ({}, changed):
            rest = rest_of(*lengths, **given, **changes)
            call = (("split_kv_attention",), ops.split_kv_attention, (q, *keys, *rest))
            yield Call(*call, masked=bool(changes or given))
    masks["bias"] = place.chunk(bias)
    *qkv, grad = map(place.chunk, whole)
    for name in ("ring_attention", "all_gather_attention"):
        for given, flag in ((masks, True), (by_distance, True), (limits, False)):
            for changes in ({}, changed):
                rest = rest_of(*lengths, **given, **changes)
                call = (name, tuple(qkv), grad, rest, flag, None)
                yield from _forward_and_backward(*call, masked=True)
    yield from _masked_steps(place, (*qkv, grad), masks)


def _masked_steps(
    place: Place, chunks: tuple[Tensor, ...], masks: dict[str, Tensor]
) -> Iterator[Call]:
    """One summary, and the step on the keys of this rank."""
    q, k, v, grad = chunks
    runs = Runs.contiguous(LENGTH, place.ranks)
    where = RingPlace(runs, runs, Layout.CONTIGUOUS, place.rank, place.rank).to_list()
    kernel = "aten_flash"
    if q.dtype == torch.float64:
        kernel = "aten_math"
    sums, shape = accumulation_dtype(q.dtype), grad.shape
    out, lse, dq = _random(sums, shape, shape[:-1], q.shape)
    spec, extras = spec_and_extras(SCALE, **masks)

    def forward(*given: Tensor) -> Any:
        q, k, v, out, lse, after, *masks = given
        summary = ops.mask_summary(q, masks, where, spec, False, kernel)
        rest = (masks, summary, None, [], where, spec, False, kernel, after)
        return ops.attention_step(q, k, v, out, lse, *rest)

    def backward(*given: Tensor) -> Any:
        grad, q, k, v, out, lse, dq, after, *masks = given
        summary = ops.mask_summary(q, masks, where, spec, True, kernel)
        told = (masks, summary, None, [], where, spec, False, kernel, after)
        saved = (grad, q, k, v, lse, out, [dq], "all, dbias")
        return ops.attention_step_backward(*saved, *told)

    names = ("mask_summary", "attention_step")
    yield Call(names, forward, (q, k, v, out, lse, v, *extras), masked=True)
    saved = (grad, q, k, v, out.to(q.dtype), lse.abs() + 2, dq, v)
    names = ("mask_summary", "attention_step_backward")
    yield Call(names, backward, (*saved, *extras), masked=True)


def _composites(place: Place, mesh: Any, dtype: torch.dtype) -> Iterator[Call]:
    """Operators that autograd takes apart: results and gradients at once."""
    *qkv, grad = map(place.chunk, _qkv(dtype, LENGTH))
    lengths = (LENGTH, LENGTH)
    for lse in (False, True):
        how = {"wants_lse": lse}
        rest = rest_of(*lengths, True, SCALE, place.group, **how)
        yield _differentiated("ulysses_attention", (*qkv, grad), rest)
        for degrees in ((place.ranks, 1), (1, place.ranks)):
            groups = hybrid_groups(mesh, 0, CPDegrees(*degrees, "ulysses"))
            more = (groups.ulysses, groups.ring, True)
            yield _differentiated("hybrid_attention", (*qkv, grad), (*rest, *more))
    row = torch.arange(LENGTH)
    key_ranges = torch.stack([(row - 4).clamp(min=0), row + 1], -1).expand(B, -1, -1)
    (bias,) = _random(dtype, (1, H, LENGTH, LENGTH))
    (of_distances,) = _random(dtype, (1, H, 2 * LENGTH - 1))
    own, key_ranges = place.chunk(bias), key_ranges.contiguous()

    def masked(*given: Any) -> list[Tensor]:
        *operands, bias, grad = (x.detach().requires_grad_() for x in given[:5])
        masks = {"bias": bias, "key_ranges": given[5]}
        rest = rest_of(*lengths, False, SCALE, place.group, **masks)
        out, _ = ops.ulysses_attention(*operands, *rest)
        leaves = [*operands, bias]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]

    for added in (own, of_distances):
        tensors = (*qkv, added, grad, key_ranges)
        yield Call(("ulysses_attention",), masked, tensors, has_fake=False, masked=True)


def _differentiated(
    name: str, tensors: tuple[Tensor, ...], rest: tuple[Any, ...]
) -> Call:
    """The last tensor is the gradient of the result."""

    def run(*given: Any) -> list[Tensor]:
        *operands, grad = given[: len(tensors)]
        leaves = [x.detach().requires_grad_() for x in operands]
        out, lse = getattr(ops, name)(*leaves, *given[len(tensors) :])
        results, grads = [out], [grad]
        if lse.numel():  # it is wanted
            results, grads = [out, lse], [grad, torch.ones_like(lse)]
        found = torch.autograd.grad(results, leaves, grads)
        return [*(x.detach() for x in results), *found]

    return Call((name,), run, (*tensors, *rest), has_fake=False)


def _in_groups(place: Place, qkv: list[Tensor]) -> Call:
    """An exchange of tokens for heads and back, begun and finished."""
    size = -(-LENGTH // place.ranks)
    blocks = [n for heads, dim in ((H, D), (G, D), (G, E))
              for n in (H, heads, LENGTH, size, dim)]  # fmt: skip

    def there_and_back(tensors: list[Tensor]) -> list[Tensor]:
        arriving = ops.ulysses_scatter_start(tensors, blocks, place.group)
        heads = ops.ulysses_scatter_finish(arriving, B, blocks, place.group)
        arriving = ops.ulysses_gather_start(heads, blocks, place.group)
        return [*heads, *ops.ulysses_gather_finish(arriving, B, blocks, place.group)]

    scatter = ("ulysses_scatter_start", "ulysses_scatter_finish")
    gather = ("ulysses_gather_start", "ulysses_gather_finish")
    return Call((*scatter, *gather), there_and_back, (qkv,), has_fake=False)


def _messages(place: Place, dtype: torch.dtype) -> Iterator[Call]:
    size = -(-LENGTH // place.ranks)
    k, v = _random(dtype, (B, G, size, D), (B, G, size, E))

    def ring(tensors: list[Tensor], after: Tensor) -> list[Tensor]:
        arriving = ops.ring_shift(tensors, place.group, "a test", after)
        return [ops.ring_wait(x, after, "a test") for x in arriving]

    shift = ("ring_shift", "ring_wait")
    yield Call(shift, ring, ([k + place.rank, v - place.rank], k), has_fake=False)
    *qkv, _ = map(place.chunk, _qkv(dtype, LENGTH))
    lengths, sizes = [LENGTH] * 3, [size] * 3
    rest = (lengths, sizes, place.group)
    yield Call(("ulysses_scatter",), ops.ulysses_scatter, (qkv, *rest))
    scattered = ops.ulysses_scatter(qkv, *rest)
    operands = (scattered, [H, G, G], *rest)
    yield Call(("ulysses_gather",), ops.ulysses_gather, operands)
    yield _in_groups(place, qkv)
    for dim, target in ((2, "zigzag"), (-2, "striped")):
        operands = (qkv[0], dim, LENGTH, "contiguous", target, place.group)
        yield Call(("relayout",), ops.relayout, operands)
    for target in (1, 3):
        sizes_of = (2, LENGTH, target, qkv[0].shape[target], place.group)
        yield Call(("dim_exchange",), ops.dim_exchange, (qkv[0], *sizes_of))
    for of_second, layouts in (
        (LENGTH, "zigzag whole zigzag"),
        (3, "striped whole striped"),
    ):
        joined = assigned(LENGTH, 1, 1 + of_second, 1, 1)
        part = qkv[0].new_ones((*qkv[0].shape[:2], of_second, *qkv[0].shape[3:]))
        pieces = [*chain.from_iterable(joined.pieces)]
        rest = (2, [LENGTH, of_second], layouts, pieces, LENGTH)
        tensors = ([qkv[0], part], *rest, 0.5, place.group)
        yield Call(("moved_tokens",), ops.moved_tokens, tensors)
        tensors = (qkv[0], *rest, place.group)
        yield Call(("moved_tokens_backward",), ops.moved_tokens_backward, tensors)
    counts = [1, 0, qkv[0].shape[2] - 1]
    yield Call(("move_runs",), ops.move_runs, (qkv[0], counts, [2, 0, 1]))
