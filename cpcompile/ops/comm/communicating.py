"""The operators that exchange messages when they run, in the order of the graph."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cpcompile.torch_private.operators import OpOverload


@functools.cache
def communicates(target: Any) -> bool:
    """Tell whether `target` is an operator of ours that sends: it has a group argument.

    An operator that is made of others before it runs does not count.
    """
    if not isinstance(target, OpOverload) or target.namespace != "cp":
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    of_group = any(argument.name == "group" for argument in target._schema.arguments)
    return of_group and not target.has_kernel_for_dispatch_key(composite)
