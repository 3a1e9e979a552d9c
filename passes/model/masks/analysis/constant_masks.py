"""Masks that are constants: their values, read as formulas.

    for i in range(S): mask[i, : i + 1] = True      where(..., where(..., where(...)))
      ->  a constant [S, S]                         ->  0 <= k and k < i + 1
    self.mask[:S, :S], a buffer of 0 and -inf
      ->  a constant [S, S]                         ->  0 <= k and k < i + 1

A formula of hundreds of nested steps is longer than what it says, and a buffer has no
formula. So a value that depends on no input but buffers can be computed, and read row
by row: as the interval of keys that a row sees, or as the one that it does not see.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.fx as fx
from torch import Tensor

from ....graph.nodes import reached
from .formula import Formula, both, either, negated
from .mask_program import MaskProgram, Unreadable
from .sums import compared
from .vectors import Evaluator, Vector, constant, from_inputs, known, positions

_MANY_STEPS = 64  # one after another; masks that are written as a formula have fewer
_MOST_STEPS = 128  # every one of them is some calls deep in the readers
_LARGEST_VALUE = 2**28  # elements of one step: 16384 x 16384
_MOST_VALUES = 16
_SAMPLE = 2**16  # elements that tell cheaply of most masks that they have more values


def fold_constants(program: MaskProgram) -> MaskProgram:
    """Replace values that take many steps, and no input, by constants.

    Returns the program. Raises: Unreadable, if many steps are left.
    """
    graph = program.module.graph
    depths = _depths(graph)
    moving = from_inputs(graph)
    folded = [
        node
        for node, depth in depths.items()
        if depth > _MANY_STEPS
        and node not in moving
        and any(user in moving or user.op == "output" for user in node.users)
    ]
    if folded:
        program = _fold(program, folded)
        depths = _depths(graph)
    steps = max(depths.values(), default=0)
    if steps > _MOST_STEPS:
        raise Unreadable(f"it is computed in {steps} steps, one after another")
    return program


def by_value(program: MaskProgram, buffers: Mapping[fx.Node, Tensor]) -> MaskProgram:
    """Replace values that depend on no inputs but these buffers by constants.

    buffers: values of the model's nodes. Raises: Unreadable, if a step is too large.
    """
    module, inputs = copy.deepcopy(program.module), program.inputs
    nodes = dict(zip(program.module.graph.nodes, module.graph.nodes, strict=True))
    program = MaskProgram(
        module, nodes[program.result], {nodes[x]: model for x, model in inputs.items()}
    )
    for number, (node, model) in enumerate(list(program.inputs.items())):
        if model in buffers:
            read = _attribute(module, node, f"cp_buffer_{number}", buffers[model])
            if program.result is node:
                program = replace(program, result=read)
    moving = from_inputs(module.graph)
    folded = [
        node
        for node in module.graph.nodes
        if node.op in ("call_function", "get_attr")
        and isinstance(node.meta.get("val"), Tensor)
        and node not in moving
        and any(user in moving or user.op == "output" for user in node.users)
    ]
    return _fold(program, folded)


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """Count, by node, the calls that lead to it one after another, itself included."""
    depths: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            before = (depths.get(x, 0) for x in node.all_input_nodes)
            depths[node] = 1 + max(before, default=0)
    return depths


def _fold(program: MaskProgram, folded: Iterable[fx.Node]) -> MaskProgram:
    """Return the program with constants in the place of these nodes."""
    module, result = program.module, program.result
    for node, value in _values(module, list(folded)).items():
        read = _attribute(module, node, f"cp_constant_of_{node.name}", value)
        result = read if result is node else result
    module.graph.eliminate_dead_code()
    return replace(program, result=result)


def _attribute(
    module: fx.GraphModule, node: fx.Node, name: str, value: Tensor
) -> fx.Node:
    """Let the readers of a node read a known tensor, an attribute of the module."""
    module.register_buffer(name, value)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(name)
    read.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(read)
    return read


def _values(module: fx.GraphModule, wanted: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Compute the values of nodes, keeping each as long as a later step needs it."""
    needed = reached(wanted, lambda x: x.all_input_nodes)
    uses = {n: sum(user in needed for user in n.users) for n in needed}
    evaluator = Evaluator(module)
    for node in module.graph.nodes:
        if node not in needed:
            continue
        size = getattr(node.meta.get("val"), "numel", lambda: 0)()
        if size > _LARGEST_VALUE:
            raise Unreadable(f"{node.name} of {size} elements is needed in whole")
        evaluator.value(node)
        for source in node.all_input_nodes:
            uses[source] -= 1
            if not uses[source] and source not in wanted:
                evaluator.forget(source)
    return {node: evaluator.value(node) for node in wanted}


def formula_of(visible: Tensor) -> Formula | None:
    """Return where a value [B or 1, H or 1, Sq, Sk] is true, as a formula.

    None if only a tensor can say that.
    """
    if visible.shape[1] > 1:
        return None
    formula = _interval(visible)
    if formula is not None:
        return formula
    hidden = _interval(~visible)
    return None if hidden is None else negated(hidden)


def numbers_in(value: Tensor) -> list[tuple[Formula, Vector]] | None:
    """Return the numbers of a value, each with the formula of where it is.

    None if that has no form.
    """
    flat = value.flatten()
    some = flat[:: max(len(flat) // _SAMPLE, 1)].unique()
    numbers = some if len(some) > _MOST_VALUES else flat.unique()
    if len(numbers) > _MOST_VALUES or bool(value.isnan().any()):
        return None
    formulas = [formula_of(value == number) for number in numbers]
    unclear = [i for i, formula in enumerate(formulas) if formula is None]
    if len(unclear) > 1:
        return None
    for i in unclear:  # wherever the others are not
        formulas[i] = negated(either(*(x for x in formulas if x is not None)))
    return [
        (formula, constant(number.item(), number.dtype))
        for formula, number in zip(formulas, numbers, strict=True)
        if formula is not None
    ]


def _interval(visible: Tensor) -> Formula | None:
    """Return first <= k < end as a formula; None if a row sees keys with a gap."""
    keys = visible.shape[-1]
    before = torch.nn.functional.pad(visible[..., :-1], (1, 0))
    if bool(((visible & ~before).sum(-1) > 1).any()):
        return None
    first = visible.int().argmax(-1, keepdim=True)
    end = first + visible.sum(-1, keepdim=True)
    columns = positions("K", keys)
    return both(
        compared("<=", known(first), columns), compared(">", known(end), columns)
    )
