"""Which argument of a call its result has its tokens from, as DTensor propagates them.

    linear(x, weight): dimension 1 of the result is dimension 1 of x

On a mesh with one rank per token an argument is split on one dimension, and the others
are replicated. If the result comes out split on the tokens in question, and nothing was
gathered on the way, that dimension has them. So sizes prove nothing; they only leave
out what cannot be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree

from cpcompile.lengths import expected
from cpcompile.passes.graph import expected_shape, fake_value
from cpcompile.passes.placement_calls import method_call
from cpcompile.passes.sequence_tokens import (
    Stream,
    TokenDim,
    candidate_dims,
    token_dim,
)
from cpcompile.passes.token_wise import nothing_moves, token_mesh

log = logging.getLogger(__name__)


class TokenSources:
    """Asks DTensor, and remembers what it said."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self.fake_mode, self.device_type = fake_mode, device_type
        self._meshes: dict[int, DeviceMesh] = {}
        self._memory: dict[Any, list[tuple[int, TokenDim]]] = {}

    def of(
        self, node: fx.Node, stream: Stream, index: int | None = None
    ) -> list[tuple[fx.Node, TokenDim]]:
        """The arguments that `stream` in the result of a call comes from.

        index: of several results, which one.
        """
        if stream.tokens < 2:
            return []
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        values = [_concrete(x) for x in leaves]
        call = method_call(node.target) if isinstance(node.target, str) else node.target
        key = _key(call, spec, values, stream, index)
        found = self._memory.get(key)
        if found is None:
            one = _Call(call, values, spec, index)
            found = list(self._trials(one, leaves, stream))
            if key is not None:
                self._memory[key] = found
        return [(leaves[number], dim) for number, dim in found]

    def _trials(
        self, call: _Call, leaves: list[Any], stream: Stream
    ) -> Iterator[tuple[int, TokenDim]]:
        """The arguments by number, each once, and their dimensions."""
        tried: set[fx.Node] = set()
        for number, (leaf, value) in enumerate(zip(leaves, call.values, strict=True)):
            if not isinstance(value, _Tensor) or leaf in tried:
                continue
            tried.add(leaf)
            for dim in candidate_dims(value.shape, stream.tokens):
                split = [dim if other is leaf else None for other in leaves]
                if self._splits(call, split, stream):
                    yield number, dim
                    break

    def _splits(
        self, call: _Call, split: list[TokenDim | None], stream: Stream
    ) -> bool:
        """Whether arguments that are split so give a result that is split so."""
        mesh = self._meshes.get(stream.tokens)
        if mesh is None:
            mesh = token_mesh(self.device_type, stream.tokens)
            self._meshes[stream.tokens] = mesh
        try:
            with nothing_moves(cut=True), self.fake_mode, torch.no_grad():
                result = call.on(mesh, split)
        except Exception as error:  # whatever DTensor's rules or views raise
            log.debug("%s split %s: %s", call.target, split, type(error).__name__)
            return False
        return token_dim(result, 0, stream.tokens) == stream.dim


@dataclass(frozen=True)
class _Call:
    """A call, with the leaves of its arguments."""

    target: Any
    values: list[Any]
    spec: Any
    index: int | None

    def on(self, mesh: DeviceMesh, split: list[TokenDim | None]) -> Any:
        """The result on tensors of a mesh."""
        leaves = [
            x.on(mesh, dim) if isinstance(x, _Tensor) else x
            for x, dim in zip(self.values, split, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with enable_python_dispatcher():
            result = self.target(*args, **kwargs)
        return result if self.index is None else result[self.index]


@dataclass(frozen=True)
class _Tensor:
    """The shape of a global tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def on(self, mesh: DeviceMesh, dim: TokenDim | None) -> DTensor:
        """A DTensor of this shape, split on `dim`."""
        shape = list(self.shape)
        if dim is not None:
            shape[dim.dim] //= mesh.size()
        placement: Placement = Replicate() if dim is None else dim.placement
        order = sorted(range(len(shape)), key=lambda d: -self.stride[d])
        local = torch.empty_permuted(shape, order, dtype=self.dtype, device=self.device)
        return DTensor.from_local(
            local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )


def _concrete(leaf: Any) -> Any:
    """A value without symbols, and without data."""
    value = fake_value(leaf)
    if isinstance(value, Tensor):
        return _Tensor(
            expected_shape(value),
            tuple(expected(n) for n in value.stride()),
            value.dtype,
            value.device,
        )
    return expected(value) if isinstance(value, torch.SymInt) else value


def _key(call: Any, spec: Any, values: list[Any], stream: Stream, index: Any) -> Any:
    """Layers repeat; None where calls cannot be compared."""
    plain = (_Tensor, int, float, bool, str, type(None), torch.dtype, torch.device)
    if any(not isinstance(x, plain) for x in values):
        return None
    typed = tuple((type(x), x) for x in values)
    return call, str(spec), typed, stream, index
