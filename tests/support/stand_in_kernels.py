"""Packages of the names of fla, mamba_ssm and causal_conv1d, whose kernels need a GPU.

As the kernels, the functions here are hidden from Dynamo, and refuse tensors without
data. They go token by token, in torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


def _kernel(function):
    """Hide a function, and let it take nothing but real tensors."""

    def call(*args, **kwargs):
        for x in (*args, *kwargs.values()):
            assert not isinstance(x, FakeTensor | DTensor), "a kernel needs data"
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__wrapped__ = function
    return call


def _wide(x: Tensor) -> Tensor:
    """Return x as kernels compute: in float32, or float64 where a test needs it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
) -> Any:
    """q, k [B, S, H, K], v [B, S, HV, V], g, beta [B, S, HV]; states [B, HV, K, V]."""
    assert not head_first, "it was dropped by fla"
    dtype, per_key = q.dtype, v.shape[2] // k.shape[2]
    q, k = (_wide(x).repeat_interleave(per_key, 2) for x in (q, k))
    v, decay, beta = _wide(v), _wide(g).exp(), _wide(beta)
    if use_qk_l2norm_in_kernel:
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    state = (
        v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        if initial_state is None
        else _wide(initial_state)
    )
    results = []
    for i in range(q.shape[1]):
        if i in starts:
            state = torch.zeros_like(state)
        state = state * decay[:, i, :, None, None]
        new = (v[:, i] - (k[:, i, :, None] @ state).squeeze(-2)) * beta[:, i, :, None]
        state = state + k[:, i, :, :, None] * new[..., None, :]
        results.append((q[:, i, :, None] @ state).squeeze(-2))
    return torch.stack(results, 1).to(dtype), state if output_final_state else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """x, z [B, S, H, P], dt [B, S, H], B, C [B, S, G, N]; states [B, H, P, N]."""
    dtype, x, dt = x.dtype, _wide(x), _wide(dt)
    per_group = x.shape[2] // B.shape[2]
    B, C = (_wide(y).repeat_interleave(per_group, 2) for y in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = (
        x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
        if initial_states is None
        else _wide(initial_states)
    )
    results = []
    for i in range(x.shape[1]):
        if (
            seq_idx is not None
            and i
            and bool((seq_idx[:, i] != seq_idx[:, i - 1]).any())
        ):
            state = state * (seq_idx[:, i] == seq_idx[:, i - 1]).view(-1, 1, 1, 1)
        new = (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]
        state = state * (dt[:, i] * A).exp()[..., None, None] + new
        y = (state @ C[:, i, ..., None]).squeeze(-1)
        results.append(y if D is None else y + x[:, i] * D[:, None])
    y = torch.stack(results, 1).to(dtype)
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_final_states else y


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """u, delta, z [B, D, S], A [D, N], B, C [B, N, S]."""
    dtype, u, delta = u.dtype, _wide(u), _wide(delta)
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    state, results = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for i in range(u.shape[2]):
        step = delta[..., i, None]
        state = state * (step * A).exp() + step * B[:, None, :, i] * u[..., i, None]
        results.append((state * C[:, None, :, i]).sum(-1))
    y = torch.stack(results, 2)
    y = (y if D is None else y + u * D[:, None]).to(dtype)
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_last_state else y


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """x [B, C, S], weight [C, K], bias [C]."""
    y, width = torch.zeros_like(x), weight.shape[1]
    for i in range(width):  # this many tokens back
        moved = F.pad(x, (i, 0))[..., : x.shape[-1]] * weight[:, width - 1 - i, None]
        if seq_idx is not None:
            same = F.pad(seq_idx, (i, 0), value=-1)[:, : x.shape[-1]] == seq_idx
            moved = moved * same[:, None]
        y = y + moved
    y = y if bias is None else y + bias[:, None]
    return F.silu(y) if activation in ("silu", "swish") else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """zxbcdt [B, S, 2 M + 2 H P + 2 G N + H], where M channels are no scan's."""
    heads, states = len(D), (len(conv1d_weight) - len(D) * headdim) // ngroups // 2
    ends = (heads * headdim, heads * headdim + 2 * ngroups * states, heads)
    mlp, z, xbc, dt = zxbcdt.split([zxbcdt.shape[-1] - sum(ends), *ends], -1)
    xbc = causal_conv1d_fn(
        xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation
    )
    x, b, c = xbc.mT.tensor_split(
        [heads * headdim, heads * headdim + ngroups * states], -1
    )
    b, c = (y.unflatten(-1, (ngroups, states)) for y in (b, c))
    x, dt = x.unflatten(-1, (heads, headdim)), dt + dt_bias
    y = mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D, dt_softplus=True, seq_idx=seq_idx
    )
    y = y.flatten(2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        y = y if norm_before_gate else y * F.silu(z)
        norms = [
            F.rms_norm(p, p.shape[-1:], eps=rmsnorm_eps) for p in y.chunk(ngroups, -1)
        ]
        y = torch.cat(norms, -1) * rmsnorm_weight
        y = y * F.silu(z) if norm_before_gate else y
    first, second = mlp.chunk(2, -1)
    y = torch.cat([F.silu(first) * second, y], -1)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
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
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    checkpoint_lvl: int = 1,
) -> Tensor:
    """xz [B, 2 D, S], conv1d_weight [D, 1, K], x_proj_weight [R + 2 N, D]."""
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    rank = delta_proj_weight.shape[1]
    r, b, c = (x_proj_weight @ x).split([rank, A.shape[1], A.shape[1]], 1)
    b = b if B_proj_bias is None else b + B_proj_bias[:, None]
    c = c if C_proj_bias is None else c + C_proj_bias[:, None]
    delta = delta_proj_weight @ r
    y = selective_scan_fn(x, delta, A, b, c, D, z, delta_bias, delta_softplus)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


_HOMES = {
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule,),
    "mamba_ssm.ops.triton.ssd_combined": (
        mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined,
    ),
    "mamba_ssm.ops.selective_scan_interface": (selective_scan_fn, mamba_inner_fn),
    "causal_conv1d": (causal_conv1d_fn,),
}


@contextmanager
def stand_ins() -> Iterator[dict[str, Any]]:
    """Install the packages; gives their functions by name."""
    before, functions = dict(sys.modules), {}
    pairs = [(home, each) for home, kernels in _HOMES.items() for each in kernels]
    for home, function in pairs:
        kernel = _kernel(function)
        kernel.__module__ = home
        functions[function.__name__] = torch.compiler.disable(kernel)
        path = home.split(".")
        for end in range(1, len(path) + 1):
            name = ".".join(path[:end])
            module = sys.modules.setdefault(name, ModuleType(name))
            if end > 1:
                parent = sys.modules[".".join(path[: end - 1])]
                setattr(parent, path[end - 1], module)
        setattr(sys.modules[home], function.__name__, functions[function.__name__])
    try:
        yield functions
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d"):
                del sys.modules[name]
