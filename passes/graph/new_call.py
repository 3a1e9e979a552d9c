"""Calls that are not in a graph yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from .constant_arguments import GraphArgument


@dataclass(frozen=True)
class NewCall:
    """A call to be written. Its arguments may be calls that are written before it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionCall:
    """A call to be written in place of the calls of a region.

    program: what the call runs. arguments: its operands, which are nodes before it.
    results: the nodes of the region that are read outside; the call returns a tuple
    with one tensor for each. inside: all nodes of the region, in order. last: the node
    after which the call can stand.
    """

    program: GraphArgument
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    last: fx.Node
