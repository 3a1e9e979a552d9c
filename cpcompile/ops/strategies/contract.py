"""Parts that all cp:: attention operators share: checks, fake results, autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.cost.plans import Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Chunks, Layout, Runs, TokenLayout
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec, is_of_positions
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.position_bias import new_bias_gradient
from cpcompile.ops.strategies.sinks import gradient_of_sinks

# grad, q, k, v, out and lse, for a backward.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def check_operands(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Chunks | Runs,
    keys: Chunks | Runs,
    rank: int,
    whole_queries: bool = False,
    whole_keys: bool = False,
) -> None:
    """Raise ValueError unless q, k, v are this rank's chunks of the sequences.

    whole_queries, whole_keys: q has all queries, k and v have all keys, on every rank.
    """
    mistakes = []
    count = queries.length if whole_queries else queries.count(rank)
    key_count = keys.length if whole_keys else keys.count(rank)
    if not (q.ndim == k.ndim == v.ndim == 4):
        mistakes.append("q, k and v need four dimensions [batch, heads, tokens, dim]")
    elif q.shape[0] != k.shape[0]:
        mistakes.append("q and k need the same batch")
    elif q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        mistakes.append("the query heads need to be a multiple of the key heads")
    elif q.shape[2] != count:
        mistakes.append(f"rank {rank} needs {count} queries")
    elif k.shape[2] != key_count:
        mistakes.append(f"rank {rank} needs {key_count} keys")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        mistakes.append("k needs the head dim of q, and v the other dims of k")
    if not (q.dtype == k.dtype == v.dtype):
        mistakes.append(f"one dtype is needed, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mistakes:
        raise ValueError(
            f"{name}: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} "
            f"of sequences of {queries.length} queries and {keys.length} keys on "
            f"{queries.ranks} ranks: {'; '.join(mistakes)}. Pass contiguous chunks as "
            "torch.chunk makes them, or DTensors sharded on the sequence."
        )


def dealt_tokens(
    strategy: Strategy,
    layout: Layout,
    queries: Chunks | Runs,
    keys: Chunks | Runs,
    is_causal: bool,
) -> TokenLayout | None:
    """Return which tokens the ranks hold, of queries and of keys alike.

    None where `queries` and `keys` say it: in the contiguous layout, and without a
    mask, since the order of the keys makes no difference then.

    Raises: ValueError for a layout that is not supported, and for causal attention in
    a layout that deals the keys out otherwise than the queries.
    """
    row = STRATEGIES[strategy]
    name = f"cp::{row.operator}"
    check_layout(name, layout, row.layouts)
    if layout is Layout.CONTIGUOUS or not is_causal:
        return None
    if queries != keys:
        raise ValueError(
            f"{name}: got {queries.length} queries and {keys.length} keys, at most "
            f"{queries.size} and {keys.size} on a rank, in the {layout.value} layout; "
            "causal attention needs as many keys as queries, or the contiguous layout"
        )
    return TokenLayout(layout, keys.length, keys.ranks, keys.size)


def check_layout(
    name: str, layout: Layout, allowed: Sequence[Layout] = (Layout.CONTIGUOUS,)
) -> None:
    """Raise ValueError for a layout in which the operator does not take tokens."""
    if layout not in allowed:
        raise ValueError(
            f"{name}: got layout={layout.value!r}; needed one of "
            f"{[x.value for x in allowed]}"
        )


def check_inputs(
    name: str, q: Tensor, inputs: AttentionInputs, lengths: tuple[int, int]
) -> None:
    """Raise ValueError unless these are inputs of q [B, H, local queries, D]."""
    (B, H, R, _), (q_len, kv_len), spec = q.shape, lengths, inputs.spec
    bias, key_ranges, q_segment_ids, kv_segment_ids = inputs.masks
    mistakes = ["is_causal, needed it in the key ranges"] if spec.is_causal else []
    shape: tuple[int, ...]
    for what, x, shape in (
        ("key_ranges", key_ranges, (B, q_len, 2)),
        ("q_segment_ids", q_segment_ids, (B, q_len)),
        ("kv_segment_ids", kv_segment_ids, (B, kv_len)),
    ):
        if x is not None and (x.is_floating_point() or x.dtype == torch.bool):
            mistakes.append(f"{what} {x.dtype}, needed integers")
        if x is not None and x.shape not in (shape, (1, *shape[1:])):
            mistakes.append(f"{what} {tuple(x.shape)}, needed {shape}, or 1 for {B}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        mistakes.append(
            "only one of q_segment_ids and kv_segment_ids, needed both or none"
        )
    if bias is not None:
        if bias.dtype != torch.bool and not bias.is_floating_point():
            mistakes.append(f"bias {bias.dtype}, needed bool or floating point")
        shape = tuple(bias.shape)
        copies = bias.ndim > 1 and shape[0] in (1, B) and shape[1] in (1, H)
        numbers = kv_len, q_len + kv_len - 1
        by_position = is_of_positions(bias) and bias.is_floating_point()
        if spec.score_mod:
            if not by_position or shape[:2] != (1, 1):
                mistakes.append(f"bias {shape}, needed [1, 1, n] of a score_mod")
        elif not copies or not (
            shape[2:] == (R, kv_len) or (by_position and shape[2] in numbers)
        ):
            mistakes.append(
                f"bias {shape}, needed {(B, H, R, kv_len)}, or of floating point with "
                f"one of {numbers} in the place of the last two, or 1 for B, H"
            )
    elif spec.score_mod:
        mistakes.append("a score_mod without a bias, needed the values that it reads")
    if spec.softcap < 0:
        mistakes.append(f"softcap {spec.softcap}, needed it positive, or 0 for none")
    if not 0 <= spec.dropout_p < 1:
        mistakes.append(f"dropout_p {spec.dropout_p}, needed it in [0, 1)")
    seeds = None if inputs.seeds is None else tuple(inputs.seeds.shape)
    if seeds != ((B, H) if spec.dropout_p else None):
        wanted = f"{(B, H)}" if spec.dropout_p else "none without dropout"
        mistakes.append(f"seeds {seeds}, needed {wanted}")
    if mistakes:
        raise ValueError(
            f"{name}: of {q_len} queries, {R} of them local, and {kv_len} keys got "
            f"{'; '.join(mistakes)}. Pass integers of the whole sequences, and of the "
            "bias the rows of the local queries"
        )


def check_mask_layout(
    strategy: Strategy, inputs: AttentionInputs, lengths: tuple[int, int]
) -> None:
    """Raise ValueError if a mask does not allow the layout."""
    row, layout, bias = STRATEGIES[strategy], inputs.spec.layout, inputs.bias
    name = f"cp::{row.operator}"
    check_layout(name, layout, row.masked_layouts)
    if layout is Layout.CONTIGUOUS:
        return
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"{name}: got {lengths[0]} queries and {lengths[1]} keys in the "
            f"{layout.value} layout; needed as many keys as queries, or the contiguous "
            "layout"
        )
    if bias is not None and not is_of_positions(bias):
        raise ValueError(
            f"{name}: got a bias {tuple(bias.shape)} in the {layout.value} layout; "
            "needed a mask of key ranges, segment ids and a bias of positions, or the "
            "contiguous layout"
        )


def register(
    forward: CustomOpDef, gradients: Callable[..., tuple[Tensor, ...]]
) -> CustomOpDef:
    """Give `forward` fake results, and the operator of its gradient, which is returned.

        forward(q, k, v, extras, ..., spec, ...) -> out, lse
        forward_backward(
            grad, q, k, v, out, lse, extras, ..., spec, ..., bias_grad, grad_lse
        ) -> dq, dk, dv, dbias

    What stands between is the same in both. The gradients are in the dtypes of the
    inputs, and dbias has the shape of the bias, but no elements unless `bias_grad`;
    grad_lse is the gradient of the log-sum-exp, if it has one. Of the extras the bias
    and the sinks have a gradient; that of the sinks is found here.

    gradients: is called as gradients((grad, q, k, v, out, lse), inputs, ..., bias_grad,
        grad_lse), without the spec.
    """
    schema = forward._opoverload._schema
    place = [x.name for x in schema.arguments].index("spec") - 4
    _, _, told = str(schema).partition("Tensor[] extras, ")

    def compute(*arguments: Any) -> tuple[Tensor, ...]:
        extras, *rest = arguments[6:]
        inputs = AttentionInputs.of(rest.pop(place), extras)
        return gradients(arguments[:6], inputs, *rest)

    backward = torch.library.custom_op(
        f"{schema.name}_backward",
        compute,
        mutates_args=(),
        schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"Tensor[] extras, {told.partition(')')[0]}, bool bias_grad, Tensor? grad_lse) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, extras, *ctx.rest = inputs
        ctx.set_materialize_grads(False)  # mostly nothing reads the log-sum-exp
        ctx.save_for_backward(*output, q, k, v, *extras)

    def of_inputs(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Any, ...]:
        out, lse, q, k, v, *extras = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        given = AttentionSpec.of_text(ctx.rest[place]).extras
        needed = dict(zip(given, ctx.needs_input_grad[3], strict=True))
        wanted = needed.get("bias", False)
        saved = (grad, q, k, v, out, lse, extras)
        dq, dk, dv, dbias = backward(*saved, *ctx.rest, wanted, grad_lse)
        found = {"bias": dbias} if wanted else {}
        if needed.get("sinks"):
            sinks = extras[given.index("sinks")]
            found["sinks"] = gradient_of_sinks(grad, out, lse, sinks, grad_lse)
        unused = [None] * len(ctx.rest)
        return dq, dk, dv, [found.get(name) for name in given], *unused

    def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
        q, k, v = arguments[1:4]
        extras, *rest = arguments[6:]
        *_, wanted, _ = rest
        bias = AttentionInputs.of(rest[place], extras).bias
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        return dq, dk, dv, new_bias_gradient(q, bias, wanted)

    forward.register_fake(fake_results)
    backward.register_fake(fake_backward)
    torch.library.register_autograd(
        forward._opoverload, of_inputs, setup_context=setup_context
    )
    return backward


def fake_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return a fake out and lse."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
