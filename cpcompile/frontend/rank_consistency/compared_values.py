"""Find the inputs that are the same on every rank, and say what to do if they differ.

They are the plain inputs, which every rank passes in whole: arguments, parameters,
buffers. The local part of a DTensor that is replicated over the axis is one of them. Of
other DTensors every rank has its own part. Activations from a part of the function
before a graph break are not compared: they are results of what is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.frontend.arguments import Frame, state_name
from cpcompile.passes.graph.context import Context, GraphInput, InputKind
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.ranks.digests import digest, sample

Number = int | Tensor  # a tensor is 0-d, and still on its device

RANDOM = "the random state"

_CHUNK = (
    "is it this rank's chunk of it? pass the whole, or cp.shard(whole, mesh, dim={dim})"
    "; else read the same data in the same order"
)
_PLAIN = "pass the same whole tensor on every rank"
_NUMBER = "pass the same number on every rank"
_STATE = (
    "seed alike before the model is made (torch.manual_seed) or load one checkpoint, "
    "and give the optimizers of all ranks the same settings and as many steps"
)
_SEED = "seed alike (torch.manual_seed) before the first call"


@dataclass(frozen=True)
class Value:
    """One input that is the same on every rank; `place` is its number."""

    place: int
    name: str
    fix: str
    is_state: bool = False  # a parameter or buffer

    def of(self, args: Sequence[Any]) -> Tensor:
        """Return this rank's tensor."""
        x: Tensor = args[self.place]
        return x._local_tensor if isinstance(x, DTensor) else x


def values_of(ctx: Context, frame: Frame) -> tuple[Value, ...]:
    """Return all inputs of a graph that have the same values on every rank."""
    compared = []
    for place, (node, graph_input) in enumerate(ctx.inputs.items()):
        value = fake_value(node)  # a DTensor's local part: its graph is rewritten
        ranks_own = (InputKind.ACTIVATION, InputKind.LOCAL_PART)
        if not isinstance(value, Tensor) or graph_input.kind in ranks_own:
            continue
        distributed = graph_input.kind in (InputKind.DTENSOR, InputKind.KEPT)
        if distributed and not graph_input.placements[ctx.axis].is_replicate():
            continue
        state = state_name(node)
        if state is not None or graph_input.kind is InputKind.PARAMETER:
            compared.append(Value(place, state or node.name, _STATE, is_state=True))
        elif not (frame.is_part and (value.is_floating_point() or value.is_complex())):
            fix = _fix(graph_input) if value.dim() else _NUMBER
            compared.append(Value(place, _name(node, graph_input, value), fix))
    return tuple(compared)


def _name(node: fx.Node, graph_input: GraphInput, value: Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    return f"input {graph_input.name or node.name} ({kind} {list(value.shape)})"


def _fix(graph_input: GraphInput) -> str:
    whole = graph_input.kind is InputKind.FULL
    return _CHUNK.format(dim=graph_input.dim) if whole else _PLAIN


def complete(values: Sequence[Value], args: Sequence[Any]) -> list[Number]:
    """Return a digest of each value."""
    return [digest(value.of(args)) for value in values]


def sampled(values: Sequence[Value], args: Sequence[Any]) -> list[Number]:
    """Digest an evenly spaced sample of each value, for the inputs of every call."""
    return [digest(sample(value.of(args))) for value in values]


def differences(
    names: Sequence[str], rank_numbers: Sequence[Sequence[int]]
) -> list[str]:
    """Return what differs, at most three names, with the first rank of each value."""
    differing = [
        i for i in range(len(names)) if len({row[i] for row in rank_numbers}) > 1
    ]
    texts = []
    for i in differing[:3]:
        first: dict[int, int] = {}
        for rank, numbers in enumerate(rank_numbers):
            first.setdefault(numbers[i], rank)
        which = ", ".join(f"rank {r} has {_short(n)}" for n, r in first.items())
        texts.append(f"{names[i]}: {which}")
    if len(differing) > 3:
        texts.append(f"and {len(differing) - 3} more")
    return texts


def _short(number: int) -> str:
    return f"{zlib.crc32(str(number).encode()):08x}"


def fixes(values: Sequence[Value], texts: Sequence[str]) -> str:
    """Return what to do about the values that are named in `texts`."""
    advice = [v.fix for v in values if any(t.startswith(f"{v.name}:") for t in texts)]
    advice += [_SEED] * any(text.startswith(RANDOM) for text in texts)
    return "; ".join(dict.fromkeys(advice))


def numbers(digests: Iterable[Number]) -> list[int]:
    """Return all digests as numbers, with one look at each device."""
    values = list(digests)
    tensors = [x for x in values if isinstance(x, Tensor)]
    devices = {x.device for x in tensors}
    by_device = {
        d: iter(torch.stack([x for x in tensors if x.device == d]).tolist())
        for d in devices
    }
    return [
        int(next(by_device[x.device])) if isinstance(x, Tensor) else x for x in values
    ]


def random_states(devices: Iterable[str]) -> list[int]:
    """Digest the state of each device's generator; no device is waited for."""
    states = []
    for device in devices:
        module = torch if device == "cpu" else torch.get_device_module(device)
        states.append(zlib.crc32(module.get_rng_state().numpy()))
    return states
