"""Write calls that AOTAutograd would take apart as one call on the whole sequence.

cp.ulysses_attention(q, k, v, ...)  ->  cp_whole.ulysses_attention(q, k, v, ...)
constraint(latent, "key source")    ->  cp_whole.latent_keys(latent, "gather")
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from cpcompile.ops.latent_keys import LATENT_KEYS, LatentStep

from ..graph.graph_pass import graph_pass
from ..graph.nodes import all_nodes
from ..graph.sequence_tokens import Wanted, wanted_of
from .composition_rules import COMPOSITIONS

_FORWARD = {x.call: x.forward for x in COMPOSITIONS}
_STEPS = {
    Wanted.KEY_SOURCE: LatentStep.GATHER,
    Wanted.COMPUTED_KEYS: LatentStep.KEYS,
}


@graph_pass()
def keep_calls(graph: fx.Graph, _: object) -> int:
    """Rewrite the calls; return how many."""
    count = 0
    for node in all_nodes(graph):
        if node.target in _FORWARD:
            node.target = _FORWARD[node.target]
        elif wanted_of(node) in _STEPS:
            arguments: tuple[Any, ...] = node.args
            x, wanted, *_ = arguments
            node.target, node.args = LATENT_KEYS, (x, _STEPS[wanted].value)
        else:
            continue
        count += 1
    return count
