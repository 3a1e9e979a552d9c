"""Run the step kernels on tensors: allocate outputs, pick a config, launch.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Tensors are on a GPU, or on the CPU under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cpcompile.kernels.configs import Kernel, StepConfig, architecture, configs, padded
from cpcompile.kernels.constants import (
    NO_MODIFIERS,
    RowLimits,
    ScoreModifiers,
    dot_precision,
    step_constants,
    tensor_names,
)
from cpcompile.kernels.operands import dense_rows
from cpcompile.kernels.render import OUTPUT, rendered

INTERPRETED_ARCHITECTURE = "sm90"  # whose config a CPU tensor gets


def forward(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHRE: Tensor | None,
    lse_BHR: Tensor | None,
    limits: RowLimits,
    scale: float,
    final: bool,
    *,
    changes: ScoreModifiers = NO_MODIFIERS,
    config: StepConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to one chunk of keys, and merge into (out, lse) of the chunks before.

    Returns out [B, H, R, E], normalised, in float32 or if `final` in q's dtype, and the
    natural log-sum-exp of the scaled scores [B, H, R] in float32, capped and not
    dropped by `changes`. Rows that have seen no key have out 0 and lse -inf.
    """
    B, H, R, _ = q_BHRD.shape
    dtype = q_BHRD.dtype if final else torch.float32
    out = q_BHRD.new_empty((B, H, R, v_BGKE.shape[-1]), dtype=dtype)
    lse = q_BHRD.new_empty((B, H, R), dtype=torch.float32)
    if sees_nothing(q_BHRD, k_BGKD, limits):
        _pass_through(out, out_BHRE, 0.0)
        _pass_through(lse, lse_BHR, float("-inf"))
        return out, lse
    tensors = {"Q": q_BHRD, "K": k_BGKD, "V": v_BGKE, "LSE_OUT": lse}
    accumulators = {"OUT_IN": out_BHRE, "LSE_IN": lse_BHR}
    visibility = (limits, scale, changes)
    launch_kernel(Kernel.FORWARD, tensors, accumulators, *visibility, out, config)
    return out, lse


def gradients(
    kernel: Kernel,
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    lse_BHR: Tensor,
    delta_BHR: Tensor,
    sums: Sequence[Tensor],
    limits: RowLimits,
    scale: float,
    final: bool,
    *,
    changes: ScoreModifiers = NO_MODIFIERS,
    config: StepConfig | None = None,
) -> list[Tensor]:
    """Return dk and dv of one chunk by DKDV, or dq by DQ.

    They are what came in, `sums`, none for zeros, plus what this step adds. `lse` is
    final, over the keys of all chunks, and delta the row sums of grad * out. Returns
    float32, or if `final` the dtype of the operands.
    """
    of_keys = kernel is Kernel.DKDV
    like, names = ([k_BGKD, v_BGKE], "DK DV") if of_keys else ([q_BHRD], "DQ")
    dtype = q_BHRD.dtype if final else torch.float32
    outputs = [x.new_empty(x.shape, dtype=dtype) for x in like]
    if sees_nothing(q_BHRD, k_BGKD, limits):
        for i, output in enumerate(outputs):
            _pass_through(output, sums[i] if sums else None, 0.0)
        return outputs
    tensors = gradient_operands(grad_BHRE, q_BHRD, k_BGKD, v_BGKE, lse_BHR, delta_BHR)
    if of_keys:
        tensors["DV_OUT"] = outputs[1]
    accumulators = {
        f"{name}_IN": sums[i] if sums else None for i, name in enumerate(names.split())
    }
    visibility = (limits, scale, changes)
    launch_kernel(kernel, tensors, accumulators, *visibility, outputs[0], config)
    return outputs


def default_config(kernel: Kernel, q_BHRD: Tensor, v_BGKE: Tensor) -> StepConfig:
    """Return the config for such operands, where nothing is tuned."""
    on_gpu = q_BHRD.device.type == "cuda"
    name = architecture(q_BHRD.device) if on_gpu else INTERPRETED_ARCHITECTURE
    dim = padded(max(q_BHRD.shape[-1], v_BGKE.shape[-1]))
    return configs(kernel, name, q_BHRD.dtype, dim)[0]


def needs_64_bits(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether an element lies 2**31 elements or more from its tensor's start."""
    return any(
        sum((n - 1) * x for n, x in zip(t.shape, t.stride(), strict=True)) >= 2**31
        for t in tensors.values()
    )


def launch_kernel(
    kernel: Kernel,
    operands: dict[str, Tensor],
    accumulators: Mapping[str, Tensor | None],
    limits: RowLimits,
    scale: float,
    changes: ScoreModifiers,
    output: Tensor,
    config: StepConfig | None,
) -> None:
    """Run a kernel on tensors by their names in its template, and write to `output`."""
    q, v = operands["Q"], operands["V"]
    optional_tensors = {n: x for n, x in accumulators.items() if x is not None}
    optional_tensors |= limits.tensors | changes.tensors
    accumulate = any(x is not None for x in accumulators.values())
    assert not accumulate or all(x is not None for x in accumulators.values()), (
        f"{kernel}: {list(accumulators)} are given together or not at all"
    )
    tensors = {
        name: dense_rows((operands | optional_tensors)[name])
        for name in tensor_names(
            kernel,
            accumulate=accumulate,
            limits=limits,
            changes=changes,
        )
    }
    (B, H, R, D), (_, G, K, E) = q.shape, v.shape
    config = config or default_config(kernel, q, v)
    constants = step_constants(
        config=config,
        rows=R,
        keys=K,
        head_dim=D,
        value_dim=E,
        heads_per_kv=H // G,
        limits=limits,
        accumulate=accumulate,
        scale=scale,
        precision=dot_precision(q.dtype),
        divides=lambda n, block: n % block == 0,
        changes=changes,
    )
    wide = needs_64_bits(tensors | {OUTPUT: output})
    constants["INDEX_DTYPE"] = "tl.int64" if wide else "tl.int32"
    step = rendered(
        kernel,
        constants,
        {name: x.dim() for name, x in tensors.items()},
        "" if changes.scoring is None else changes.scoring.functions,
    )
    row_tiles, key_tiles = -(-R // config.block_m), -(-K // config.block_n)
    grid = {
        Kernel.DKDV: (key_tiles, B, G),
        Kernel.DBIAS: (output.shape[-1] // config.block_n, B, H),
    }.get(kernel, (row_tiles, B, H))
    tensors[OUTPUT] = output
    arguments = [
        tensors[x.tensor]
        if x.dim is None
        else (tensors[x.tensor].stride if x.is_stride else tensors[x.tensor].size)(
            x.dim
        )
        for x in step.arguments
    ]
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        step.function[grid](
            *arguments, num_warps=config.num_warps, num_stages=config.num_stages
        )


def gradient_operands(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
) -> dict[str, Tensor]:
    return {"GRAD": grad, "Q": q, "K": k, "V": v, "LSE": lse, "DELTA": delta}


def sees_nothing(q: Tensor, k: Tensor, limits: RowLimits) -> bool:
    return limits.visible.is_empty or not q.numel() or not k.numel()


def _pass_through(output: Tensor, incoming: Tensor | None, nothing: float) -> None:
    """Write to `output` what a step without any visible key returns."""
    if incoming is None:
        output.fill_(nothing)
    else:
        output.copy_(incoming)
