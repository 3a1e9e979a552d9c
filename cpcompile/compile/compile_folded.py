"""Compile a graph with its repeated blocks as one function, or else as it is."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from cpcompile.passes.local.folding.fold_repeated_blocks import (
    FoldedBlocks,
    find_blocks,
    fold_repeated_blocks,
)
from cpcompile.passes.local.folding.folding_options import Folding
from cpcompile.passes.local.folding.repeated_blocks import Blocks
from cpcompile.passes.pipeline import run_passes
from cpcompile.refusals import check_refusal
from cpcompile.torch_private.inductor import CompiledFxGraph, inductor_config

log = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule], Any]


def compile_folded(gm: fx.GraphModule, compile_graph: Compile, folding: Folding) -> Any:
    """Compile `gm` with `compile_graph`, folded if all ranks fold and compile it so.

    A rank that folds other blocks than the others would exchange messages in another
    order. So none does unless all do, in the same way.
    """
    blocks = [] if inductor_config.cpp_wrapper else _found(gm)
    text = ", ".join(str(FoldedBlocks.of(repeated)) for repeated in blocks)
    if not folding.agree(text) or not blocks:
        return compile_graph(gm)
    try:
        program, problem = _compiled(gm, blocks, compile_graph), None
    except Exception as error:  # whatever Inductor raises for functions
        check_refusal(error, "the compilation of repeated blocks")
        program, problem = None, error
    if problem is None and folding.agree("compiled"):
        folding.found.extend(map(FoldedBlocks.of, blocks))
        return program
    if problem is not None:
        folding.agree("not compiled")
    log.debug("%s are compiled one by one: %s", text, problem or "another rank failed")
    return compile_graph(gm)


def _found(gm: fx.GraphModule) -> list[Blocks]:
    try:
        return find_blocks(gm.graph)
    except Exception as error:  # the other ranks wait for what is said of it
        check_refusal(error, "the search for repeated blocks")
        log.debug("blocks are compiled one by one: %r", error)
        return []


def _compiled(gm: fx.GraphModule, blocks: list[Blocks], compile_graph: Compile) -> Any:
    folded, copies = _copied(gm)
    rows = [repeated.copied(copies) for repeated in blocks]
    run_passes(folded, (fold_repeated_blocks,), rows)
    program = compile_graph(folded)
    if isinstance(program, CompiledFxGraph):
        check_results(program.source_code)
    return program


def _copied(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, copies))
    output.meta = copy.copy(gm.graph.output_node().meta)
    module = fx.GraphModule(gm, graph)
    module.meta.update(gm.meta)
    return module, copies


class SharedResult(Exception):
    """A generated function returns memory of an operand, or the same memory twice."""


_FUNCTION = re.compile(r"^def (?P<name>\w*block_\d+)\(args\):\n", re.MULTILINE)
_OPERANDS = re.compile(r"^    (?P<names>[\w, ]+?),? = args$", re.MULTILINE)
_RETURN = re.compile(r"^    return \((?P<results>.*)\)$", re.MULTILINE)
_NAME = re.compile(r"\b\w*(?:buf|operand_)\d+\b")


def check_results(code: str) -> int:
    """Check that functions of blocks return memory of their own; return how many.

    Inductor frees and overwrites results and operands of a call as if none shared any.

    Raises: SharedResult.
    """
    functions = list(_FUNCTION.finditer(code))
    for function in functions:
        body = code[function.end() :]
        operands, returned = _OPERANDS.search(body), _RETURN.search(body)
        if operands is None or returned is None:
            raise SharedResult(f"{function['name']} cannot be read")
        names = _NAME.findall(returned["results"])
        operand_names = set(operands["names"].split(", "))
        if len(set(names)) < len(names) or not operand_names.isdisjoint(names):
            raise SharedResult(f"{function['name']} returns ({returned['results']})")
    return len(functions)
