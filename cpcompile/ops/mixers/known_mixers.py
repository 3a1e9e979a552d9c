"""The table of functions that mix tokens, of public packages and of transformers.

    fla            gated delta rules and Kimi's, by chunks and token by token
    mamba_ssm      state-space models: by chunks, and selective scans
    causal_conv1d  depthwise convolutions
    transformers   the same in torch, under names of its own

Signatures were read in fla-core 0.6.0, mamba_ssm 2.2, causal_conv1d 1.5 and
transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.ops.mixers.mixer import Mixer, MixerState, at_least_float32

_PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "transformers")


def known_mixer(function: Callable[..., Any]) -> Mixer | None:
    """Return what the table says of a function of these packages; None if nothing."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return _MIXERS.get(function.__name__) if package in _PACKAGES else None


def _delta_results(a: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """o [B, S, HV, V] in the dtype of q; states [B, HV, K, V] in float32."""
    q, k, v = a["q"], a["k"], a["v"]
    o = q.new_empty(v.shape)
    if not a.get("output_final_state"):
        return o, None
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return o, q.new_empty(shape, dtype=at_least_float32(q.dtype))


def _delta_shape(a: Mapping[str, Any]) -> MixerShape:
    """Return the sizes of a gated delta rule; KDA has gates of every key dim."""
    kind = MixerKind.KDA if a["g"].ndim == 4 else MixerKind.GATED_DELTA_RULE
    (batch, tokens, key_heads, key_dim), v = a["k"].shape, a["v"].shape
    element = a["k"].element_size()
    return MixerShape(kind, batch, tokens, key_heads, v[2], key_dim, v[3], element)


def _delta_rule() -> Mixer:
    """q, k [B, S, H, K], v [B, S, HV, V], g, beta [B, S, HV]; states [B, HV, K, V]."""
    per_token = ("q", "k", "v", "g", "beta", "return[0]")
    states = ("initial_state", "return[1]")
    return Mixer(
        tokens=dict.fromkeys(per_token, 1),
        independent={
            "heads": dict.fromkeys(per_token, 2) | dict.fromkeys(states, 1),
            "batch": dict.fromkeys((*per_token, *states), 0),
            "value channels": dict.fromkeys(("v", "return[0]", *states), 3),
        },
        state=MixerState(
            "initial_state",
            "output_final_state",
            "return[1]",
            ("v",),
            rows=2,
            columns=3,
        ),
        results=_delta_results,
        ndims={"q": 4, "k": 4, "v": 4, "beta": 3},
        others=frozenset(
            ("scale", "chunk_size", "use_qk_l2norm_in_kernel", "cu_seqlens")
        ),
        aliases={"query": "q", "key": "k", "value": "v"},
        shape=_delta_shape,
    )


def _scan_results(a: Mapping[str, Any]) -> Any:
    """y [B, S, H, P] in the dtype of x; states [B, H, P, N]."""
    x, b = a["x"], a["B"]
    y = x.new_empty(x.shape)
    if not a.get("return_final_states"):
        return y
    return y, x.new_empty(
        x.shape[0], *x.shape[2:], b.shape[-1], dtype=at_least_float32(x.dtype)
    )


def _scan_shape(a: Mapping[str, Any]) -> MixerShape:
    """Return the sizes of Mamba2."""
    (batch, tokens, heads, dim), b = a["x"].shape, a["B"].shape
    kind, element = MixerKind.MAMBA2, a["x"].element_size()
    return MixerShape(kind, batch, tokens, b[2], heads, b[3], dim, element)


def _chunk_scan() -> Mixer:
    """x, z [B, S, H, P], dt [B, S, H], B, C [B, S, G, N]; states [B, H, P, N]."""
    per_token = ("x", "dt", "B", "C", "z", "return")
    per_head = ("A", "D", "dt_bias")
    states = ("initial_states", "return[1]")
    return Mixer(
        tokens=dict.fromkeys((*per_token, "seq_idx"), 1),
        independent={
            "heads": dict.fromkeys(per_token, 2)
            | dict.fromkeys(per_head, 0)
            | dict.fromkeys(states, 1),
            "batch": dict.fromkeys((*per_token, *states, "seq_idx"), 0),
            "value channels": dict.fromkeys(("x", "z", "return"), 3)
            | dict.fromkeys(states, 2)
            | {"D": 1},  # or one number for all channels of a head
        },
        state=MixerState("initial_states", "return_final_states", "return[1]", ("x",)),
        results=_scan_results,
        shape=_scan_shape,
        ndims={"x": 4, "dt": 3, "A": 1, "B": 4, "C": 4, "dt_bias": 1},
        others=frozenset(("chunk_size", "dt_softplus", "dt_limit", "cu_seqlens")),
        aliases={"hidden_states": "x"},
    )


def _selective_results(a: Mapping[str, Any]) -> Any:
    """y [B, D, S] in the dtype of u; the last state [B, D, N]."""
    u = a["u"]
    y = u.new_empty(u.shape)
    if not a.get("return_last_state"):
        return y
    return y, u.new_empty(
        *u.shape[:2], a["A"].shape[1], dtype=at_least_float32(u.dtype)
    )


def _selective_shape(a: Mapping[str, Any]) -> MixerShape:
    """Return the sizes of Mamba, one head per channel."""
    (batch, channels, tokens), states = a["u"].shape, a["A"].shape[1]
    kind, element = MixerKind.MAMBA, a["u"].element_size()
    return MixerShape(kind, batch, tokens, 1, channels, states, 1, element)


def _selective_scan() -> Mixer:
    """u, delta, z [B, D, S], A [D, N], B, C [B, N, S], D, delta_bias [D].

    There is no state to begin with: packages have none here.
    """
    per_token = ("u", "delta", "z", "return")
    return Mixer(
        tokens=dict.fromkeys((*per_token, "B", "C"), 2),
        independent={
            "channels": dict.fromkeys((*per_token, "return[1]"), 1)
            | dict.fromkeys(("A", "D", "delta_bias"), 0),
            "batch": dict.fromkeys((*per_token, "B", "C", "return[1]"), 0),
        },
        results=_selective_results,
        shape=_selective_shape,
        ndims={"u": 3, "delta": 3, "A": 2, "B": 3, "C": 3, "D": 1, "delta_bias": 1},
        others=frozenset(
            (
                "delta_softplus",
                "return_last_state",
                "use_mambapy",
                "use_associative_scan",
            )
        ),
        aliases={"hidden_states": "u", "dt": "delta"},
    )


def _causal_convolution() -> Mixer:
    """x [B, C, S], weight [C, K], bias [C]."""
    return Mixer(
        tokens={"x": 2, "return": 2, "seq_idx": 1},
        independent={
            "channels": {"x": 1, "weight": 0, "bias": 0, "return": 1},
            "batch": {"x": 0, "seq_idx": 0, "return": 0},
        },
        results=lambda a: a["x"].new_empty(a["x"].shape),
        ndims={"x": 3, "weight": 2},
        others=frozenset(("activation",)),
        aliases={"hidden_states": "x"},
    )


def _rwkv() -> Mixer:
    """key, value [B, S, C], time_decay, time_first [C]; no state is given."""
    per_token = ("key", "value", "return[0]")
    return Mixer(
        tokens=dict.fromkeys(per_token, 1),
        independent={
            "channels": dict.fromkeys(per_token, 2)
            | dict.fromkeys(("time_decay", "time_first"), 0),
            "batch": dict.fromkeys(per_token, 0),
        },
        results=lambda a: (a["key"].new_empty(a["key"].shape), None),
        ndims={"key": 3, "value": 3, "time_decay": 1, "time_first": 1},
        others=frozenset(),
    )


_MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(
        (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "chunk_kda",
            "fused_recurrent_kda",
            "chunk_kimi_delta_attention",
            "recurrent_kimi_delta_attention",
        ),
        _delta_rule(),
    ),
    **dict.fromkeys(("mamba_chunk_scan_combined", "mamba2_chunk_scan"), _chunk_scan()),
    **dict.fromkeys(("selective_scan_fn", "mamba_selective_scan"), _selective_scan()),
    "rwkv_linear_attention": _rwkv(),
    "causal_conv1d_fn": _causal_convolution(),
}
