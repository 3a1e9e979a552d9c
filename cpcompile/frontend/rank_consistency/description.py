"""Describe what a rank is about to compile, in texts for the ranks to compare.

The comparison is in cpcompile.ranks.agreement.
"""

from __future__ import annotations

import hashlib

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.frontend.arguments import Frame, argument_path
from cpcompile.frontend.rank_consistency.environment import how_watched, surroundings
from cpcompile.geometry.lengths import expected
from cpcompile.options import Options
from cpcompile.passes.graph.nodes import whole_value
from cpcompile.passes.graph.readable import readable
from cpcompile.ranks.digests import value_text


def describe(
    graph: fx.Graph,
    options: Options,
    named: dict[fx.Node, tuple[str, int]],
    frame: Frame,
    device_type: str,
) -> dict[str, str]:
    """Return what the ranks must agree on, item by item.

    The values of named integers are included: ranks that load different tokens, as for
    data parallelism, would otherwise train on a mixture without a sign. Where the user
    names nothing, the values of all integer arguments are included: what is not sharded
    has to be the same on every rank, too.
    """
    inductor = options.inner == "inductor"
    description = {"options": options.fingerprint()}
    description |= surroundings(device_type, frame.values, inductor) | how_watched()
    compared = {node: name for node, (name, _) in named.items()}
    for node in graph.find_nodes(op="placeholder"):
        value = whole_value(node)
        if isinstance(value, Tensor):
            shape = [expected(n) for n in value.shape]
            text = f"{value.dtype} {shape}"
            if value.device.type != device_type:
                text += f" on {value.device.type}"
            if isinstance(value, DTensor):
                text += f", {value.placements}"
            if value.requires_grad:
                text += ", requires_grad"
            description[f"input {node.name}"] = text
        path = argument_path(node, frame)
        if path is not None and not options.shard and not isinstance(value, DTensor):
            compared.setdefault(node, ".".join(path))
    for node, name in compared.items():
        digest = _digest(getattr(node.meta.get("grapharg"), "example", None))
        if digest is not None:
            description[f"values of {name}"] = digest
    text = hashlib.sha256(readable(graph).encode()).hexdigest()
    return description | {"graph": text[:12]}


def _digest(x: object) -> str | None:
    """Return a digest of an integer tensor's values; None for anything else."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return None
    return value_text(x)
