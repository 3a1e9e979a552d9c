"""Formulas of torch for functions that are better not kept whole.

A depthwise convolution needs a few tokens of the neighbour, which the compiler borrows
where it sees the convolution. A call that does a convolution, a scan and projections
at once is independent along no dimension: its parts are.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED = (
    "mamba_split_conv1d_scan_combined",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
)


def in_torch(function: Any) -> Callable[..., Any] | None:
    """Return what is called in place of a function of these packages, or None."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    name = getattr(function, "__name__", None)
    if package == "transformers" and (name in _FUSED or name == "causal_conv1d_fn"):
        # Beside the kernel there is what transformers computes without it. Where that
        # is nothing, the model calls the parts one by one.
        return getattr(function, "__wrapped__", None)
    if package == "causal_conv1d" and name == "causal_conv1d_fn":
        return causal_convolution
    if package == "mamba_ssm" and name in _SCANS:
        # The scan stays the package's own; it lies beside the function.
        parts, scan_name = _SCANS[name]
        scan = getattr(sys.modules.get(function.__module__), scan_name, None)
        return None if scan is None else _with_scan(parts, scan)
    return None


def with_documents(function: Any) -> Callable[..., Any] | None:
    """Return what is called in place of a fused function for packed documents, or None.

    The packages' own scan and convolution keep the documents apart.
    """
    taken = None
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    if package == "transformers" and hasattr(function, "__wrapped__"):
        variables = inspect.getclosurevars(function).nonlocals
        function = variables.get("implementation")
        taken = variables.get("applicable_params")
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
    name = getattr(function, "__name__", None)
    if package != "mamba_ssm" or name != "mamba_split_conv1d_scan_combined":
        return None
    home = sys.modules.get(function.__module__)
    scan = getattr(home, "mamba_chunk_scan_combined", None)
    convolve = getattr(sys.modules.get("causal_conv1d"), "causal_conv1d_fn", None)
    if scan is None or convolve is None:
        return None
    return _of_documents(scan, convolve, taken)


@functools.cache
def _of_documents(
    scan: Any, convolve: Any, taken: tuple[str, ...] | None
) -> Callable[..., Any]:
    parts = split_scan(scan, convolve)
    if taken is None:
        return parts

    def call(*args: Any, **kwargs: Any) -> Any:
        return parts(*args, **{name: kwargs[name] for name in kwargs if name in taken})

    return call


@functools.cache  # Dynamo's guards want the same function each time
def _with_scan(
    parts: Callable[[Any], Callable[..., Any]], scan: Any
) -> Callable[..., Any]:
    return parts(scan)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: None = None,
    initial_states: None = None,
    return_final_states: bool = False,
    final_states_out: None = None,
    activation: str | None = None,
) -> Tensor:
    """Return a depthwise convolution over earlier tokens, as causal_conv1d_fn does.

    Args:
        x: [B, C, S]. weight: [C, K]. bias: [C]. activation: None, "silu" or "swish".

    Returns: [B, C, S], in the dtype of x.
    """
    size, width = x.shape[-1], weight.shape[1]
    y = F.conv1d(
        x.to(weight.dtype),
        weight.unsqueeze(1),
        bias,
        padding=width - 1,
        groups=weight.shape[0],
    )[..., :size]
    return (F.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)


def split_scan(
    scan: Callable[..., Any], convolve: Callable[..., Tensor] = causal_convolution
) -> Callable[..., Tensor]:
    """Return what mamba_split_conv1d_scan_combined computes, with a scan of Mamba2."""

    def parts(
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        initial_states: None = None,
        seq_idx: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str | None = "silu",
        rmsnorm_weight: Tensor | None = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Tensor | None = None,
        outproj_bias: Tensor | None = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
    ) -> Tensor:
        heads = D.shape[0]
        dim = heads * (D.shape[1] if D.ndim == 2 else headdim or 0)
        grouped = (conv1d_weight.shape[0] - dim) // 2  # channels of B, and of C
        beside = zxbcdt.shape[-1] - 2 * dim - 2 * grouped - heads
        mlp, z, xbc, dt = zxbcdt.split([beside, dim, dim + 2 * grouped, heads], -1)
        documents = {} if seq_idx is None else {"seq_idx": seq_idx}
        xbc = convolve(
            xbc.transpose(1, 2),
            conv1d_weight,
            conv1d_bias,
            activation=activation,
            **documents,
        ).transpose(1, 2)
        x, b, c = xbc.split([dim, grouped, grouped], -1)
        gate = None if rmsnorm_weight is not None else z.unflatten(-1, (heads, -1))
        y: Tensor = scan(
            x.unflatten(-1, (heads, -1)),
            dt,
            A,
            b.unflatten(-1, (ngroups, -1)),
            c.unflatten(-1, (ngroups, -1)),
            chunk_size=chunk_size,
            D=D,
            z=gate,
            dt_bias=dt_bias,
            dt_softplus=True,
            dt_limit=dt_limit,
            **documents,
        ).flatten(2)
        if rmsnorm_weight is not None:
            y = _gated_norm(
                y, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate
            )
        if beside:
            first, second = mlp.chunk(2, -1)
            y = torch.cat([F.silu(first) * second, y], -1)
        if outproj_weight is None:
            return y
        return F.linear(y.to(outproj_weight.dtype), outproj_weight, outproj_bias)

    return parts


def _gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool
) -> Tensor:
    """Return the RMS norm of each group of channels, gated by silu(z)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gate = x.to(wide), F.silu(z.to(wide))
    y = y if norm_first else y * gate
    grouped = y.unflatten(-1, (groups, -1))
    scale = (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed: Tensor = (grouped * scale).flatten(-2) * weight.to(wide)
    return (normed * gate if norm_first else normed).to(x.dtype)


def inner_scan(scan: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return what mamba_inner_fn computes, with a selective scan of Mamba."""

    def parts(
        xz: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        x_proj_weight: Tensor,
        delta_proj_weight: Tensor,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        A: Tensor,
        B: Tensor | None = None,
        C: Tensor | None = None,
        D: Tensor | None = None,
        delta_bias: Tensor | None = None,
        B_proj_bias: Tensor | None = None,
        C_proj_bias: Tensor | None = None,
        delta_softplus: bool = True,
        cu_seqlens: None = None,
        seq_idx: None = None,
        checkpoint_lvl: int = 1,
    ) -> Tensor:
        x, z = xz.chunk(2, 1)
        x = causal_convolution(
            x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu"
        )
        projected = F.linear(x.transpose(1, 2), x_proj_weight)  # [B, S, R + 2 N]
        rank, states = delta_proj_weight.shape[1], A.shape[1]
        delta = F.linear(projected[..., :rank], delta_proj_weight).transpose(1, 2)
        if B is None:
            b = projected[..., rank : rank + states]
            B = (b if B_proj_bias is None else b + B_proj_bias.to(b.dtype)).transpose(
                1, 2
            )
        if C is None:
            c = projected[..., -states:]
            C = (c if C_proj_bias is None else c + C_proj_bias.to(c.dtype)).transpose(
                1, 2
            )
        y = scan(
            x,
            delta,
            A,
            B,
            C,
            D,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
        )
        return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)

    return parts


_SCANS = {
    "mamba_split_conv1d_scan_combined": (split_scan, "mamba_chunk_scan_combined"),
    "mamba_inner_fn": (inner_scan, "selective_scan_fn"),
}
