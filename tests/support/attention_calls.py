"""Calls of the attention operators, with what their spec says as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Layout
from cpcompile.ops.attention_spec import EXTRAS, AttentionSpec


def spec_and_extras(
    scale: float, is_causal: bool = False, layout: str = "contiguous", **given: Any
) -> tuple[str, list[torch.Tensor]]:
    """The text of a spec and the tensors that it names.

    given: tensors by the names of EXTRAS, None for none, and other fields of the spec.
    """
    tensors = {name: given.pop(name, None) for name in EXTRAS}
    spec = AttentionSpec(scale, is_causal, Layout(layout), **given)
    spec, extras = spec.with_extras(tensors)
    return str(spec), extras


def rest(
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    *groups: Any,
    runs: tuple[int, ...] = (),
    **given: Any,
) -> tuple[Any, ...]:
    """The arguments of an operator after q, k and v: extras, sizes, spec and groups.

    runs: pieces, q_size and kv_size of a ring. given: as for `spec_and_extras`.
    """
    spec, extras = spec_and_extras(scale, is_causal, **given)
    return extras, [q_len, kv_len, *runs], spec, *groups


def groups_of(
    strategy: str, group: str, ulysses_inner: bool = True
) -> tuple[str | bool, ...]:
    """The groups of an operator on the one rank of `group`."""
    return (group, group, group, ulysses_inner) if strategy == "hybrid" else (group,)


def rest_of_local(scale: float, **given: Any) -> tuple[Any, ...]:
    """The arguments of cp::local_attention after q, k and v."""
    spec, extras = spec_and_extras(scale, **given)
    return extras, spec


def attention(strategy: str) -> Callable[..., Any]:
    """An operator: q, k, v, and what `rest` takes, or `rest_of_local`."""
    op = getattr(torch.ops.cp, f"{strategy}_attention")
    others = rest_of_local if strategy == "local" else rest

    def call(q: Any, k: Any, v: Any, *args: Any, **given: Any) -> Any:
        return op(q, k, v, *others(*args, **given))

    return call
