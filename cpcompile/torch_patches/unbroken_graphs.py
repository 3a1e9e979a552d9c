"""Keep the graph of a model in one piece, where Dynamo breaks it (torch 2.13).

`x.requires_grad_()` of a value that the program computes: a hook on the embedding does
that for reentrant checkpoints, and is registered for LoRA by
`enable_input_require_grads` of transformers and PEFT. AOTAutograd drops the effect of
the call, so that Dynamo breaks the graph there if a result is computed from the value.
But a result that requires a gradient anyway, of a parameter such as an adapter, is the
same without the effect: under backend "cp" the call is taken out of the graph then.

nn.TransformerEncoder and TransformerDecoder compare the mask with a causal one, with
is_causal=None, their default. Dynamo breaks the graph at the answer, which is data; and
as it compiles no function of torch.nn on its own, the whole encoder runs in eager. The
answer only chooses a kernel: without it the mask itself is used, which says the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable
from torch.nn.modules import transformer

from cpcompile.torch_patches.graph_breaks import is_ours


@functools.cache
def keep_leaves() -> None:
    """Have Dynamo ask whether a call of requires_grad_ makes a difference."""
    original = getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)
    if original is None:  # another torch: the break is a warning
        return

    @functools.wraps(original)
    def check(self: Any, rv: list[Any], tx: Any) -> None:
        if is_ours(self.compiler_fn) and _is_without_effect(self, rv):
            _erase_calls(self.graph, _leaves(self))
            return
        original(self, rv, tx)

    OutputGraph._check_requires_grad_intermediate_outputs = check  # type: ignore[method-assign]


def _leaves(output: Any) -> set[fx.Node]:
    """Return the values of the graph that became leaves of autograd."""
    return {x.as_proxy().node for x in output.leaf_var_creation_order if not x.source}


def _is_without_effect(output: Any, results: list[Any]) -> bool:
    """Tell whether each result requires a gradient of something else than the leaves.

    If the program computes gradients itself, or hooks them, the leaves may be read.
    """
    leaves = _leaves(output)
    if not leaves or output.autograd_grad_consumed_grad_fns:
        return False
    if output.side_effects.tensor_hooks:
        return False
    own = {id(x.meta["example_value"]) for x in leaves}
    values = [
        x.as_proxy().node.meta["example_value"]
        for x in results
        if isinstance(x, TensorVariable)
    ]
    return all(_has_other_leaf(x, own) for x in values if x.requires_grad)


def _has_other_leaf(value: Tensor, own: set[int]) -> bool:
    """Tell whether a gradient flows to a leaf whose id is not in `own`."""
    if value.grad_fn is None:
        return id(value) not in own
    visited: set[Any] = {None}
    functions: list[Any] = [value.grad_fn]
    while functions:
        function = functions.pop()
        if function in visited:
            continue
        visited.add(function)
        variable = getattr(function, "variable", None)  # of AccumulateGrad alone
        if variable is not None and id(variable) not in own:
            return True
        functions += [following for following, _ in function.next_functions]
    return False


def _erase_calls(graph: fx.Graph, leaves: set[fx.Node]) -> None:
    """Erase the calls, and what allows each of them before and after it."""
    for node in list(graph.find_nodes(op="call_method", target="requires_grad_")):
        if node.args[0] in leaves and not node.users:
            allows = torch._C._functorch.set_inplace_requires_grad_allowed
            for near in (node.prev, node.next):
                if near.op == "call_function" and near.target is allows:
                    graph.erase_node(near)
            graph.erase_node(node)


@functools.cache
def keep_encoders() -> None:
    """Let Dynamo not trace the comparison; eager makes it as before."""
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:  # another torch: the break is a warning
        return
    torch.compiler.substitute_in_graph(original)(_detect_is_causal_mask)


def _detect_is_causal_mask(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Return what the caller says in `is_causal`, and False where it says nothing."""
    return is_causal is True
