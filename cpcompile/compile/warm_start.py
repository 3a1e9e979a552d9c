"""Compile a rewritten graph, or load what an earlier start has made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist
import torch.fx as fx

from cpcompile import config
from cpcompile.accounting.read import Accounting
from cpcompile.compile import torch_cache
from cpcompile.compile.compile_local import has_symbols
from cpcompile.compile.inner_compilers import compile_inner
from cpcompile.compile.stored_programs import (
    AllGatherText,
    CompilationFindings,
    load_or_compile,
)
from cpcompile.compile.torch_cache import NoKey, ProgramKey, sources_digest
from cpcompile.frontend.rank_consistency.environment import surroundings
from cpcompile.ops.comm.communicating import communicates
from cpcompile.options import Options
from cpcompile.passes.graph.nodes import module_path
from cpcompile.passes.joint.saving.save_by_budget import SavingBudget
from cpcompile.passes.joint.tiling.tile_tokens import Tiling
from cpcompile.passes.local.folding.folding_options import Folding
from cpcompile.passes.whole.edges import Edges
from cpcompile.torch_patches import dead_collectives
from cpcompile.torch_patches.dead_collectives import Partition

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledProgram:
    """What runs, and what it exchanges, item by item, for the ranks to compare."""

    run: Callable[..., Any]
    exchanges: dict[str, str]


@dataclass(frozen=True)
class Compilation:
    """How a graph is compiled; its parts get what was found in it.

    options: with the compiler that the graph needs.
    device_type: of the mesh.
    """

    options: Options
    device_type: str
    tiling: Tiling
    saving: SavingBudget | None
    folding: Folding | None
    accounting: Accounting
    edges: Edges | None = None

    def lists(self) -> dict[str, list[Any]]:
        """Return the lists that compiling appends to."""
        lists: dict[str, list[Any]] = {
            "tiled": self.tiling.found,
            "returned": self.tiling.returned,
            "accounts": self.accounting.accounts,
        }
        if self.saving is not None:
            lists["saved"] = self.saving.found
        if self.folding is not None:
            lists["folded"] = self.folding.found
        if self.edges is not None:
            lists["outcomes"] = self.edges.outcomes
        return lists

    def compile(
        self, gm: fx.GraphModule, inputs: list[Any], keep: bool
    ) -> Callable[..., Any]:
        """Compile `gm`.

        keep: whether AOTAutograd's cache gets the program, or has it.
        """
        try:
            return compile_inner(
                gm,
                inputs,
                self.options,
                self.tiling,
                self.saving,
                self.folding,
                self.accounting,
                cache=torch_cache.settings() if keep else None,
                edges=self.edges,
            )
        finally:
            # torch's cache sets this for the time of its look-up. A copy of Dynamo's
            # graph has none, and would be taken for the original afterwards.
            if vars(gm).get("_param_name_to_source", ()) is None:
                del gm._param_name_to_source


def compiled_or_loaded(
    gm: fx.GraphModule,
    inputs: list[Any],
    how: Compilation,
    all_gather_text: AllGatherText,
) -> CompiledProgram:
    """Compile the program of `gm` on all ranks, or load it on all of them.

    Args:
        inputs: local ones, fake or real.
        all_gather_text: takes a text of this rank, and gives those of all ranks.
    """
    program = _compiled_or_loaded(gm, inputs, how, all_gather_text)
    if how.edges is not None:
        for outcome in how.edges.outcomes:
            outcome.tell(how.edges.ctx.findings)
    return program


def _compiled_or_loaded(
    gm: fx.GraphModule,
    inputs: list[Any],
    how: Compilation,
    all_gather_text: AllGatherText,
) -> CompiledProgram:
    with dead_collectives.partitions() as graphs:

        def texts() -> dict[str, str]:
            return exchange_texts(graphs)

        if how.options.inner != "inductor":
            return CompiledProgram(how.compile(gm, inputs, keep=False), texts())
        key = _key(gm, how) if _may_keep(inputs) else None
        findings = CompilationFindings(how.lists(), texts)
        return CompiledProgram(
            *load_or_compile(
                lambda keep: how.compile(gm, inputs, keep),
                key,
                findings,
                all_gather_text,
            )
        )


def _may_keep(inputs: list[Any]) -> bool:
    """Tell whether this rank keeps the program, and looks for it."""
    if config.check_overlap:  # reads the code when it is generated
        return False
    if not torch_cache.is_on():
        return False
    problem = torch_cache.problem()
    if has_symbols(inputs):  # see compile_local
        problem = "it is a program for many lengths"
    if problem is not None:
        log.info("a second start compiles again: %s", problem)
    return problem is None


def _key(gm: fx.GraphModule, how: Compilation) -> ProgramKey | None:
    """Return the key of the program; None if it has none."""
    saving, sources = (
        how.saving and (how.saving.given, how.saving.offload),
        sources_digest(),
    )
    around = surroundings(how.device_type, {}, inductor=True)
    parts = [
        f"rank {dist.get_rank()} of {dist.get_world_size()}",
        f"mode {how.options.mode}",
        f"tiles {how.tiling.key()}, saving {saving}, folding {how.folding is not None}",
        f"sources {sources}",
        f"edges {how.edges and how.edges.key()}",
        *(f"{name}: {value}" for name, value in around.items()),
        *_places(gm),
    ]
    try:
        return ProgramKey.of(gm, "\n".join(parts), sources)
    except NoKey as error:
        log.info("a second start compiles again: %s", error)
        return None


def _places(gm: fx.GraphModule) -> Iterator[str]:
    """Yield where calls stand in the model, which accounts name, and annotations."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                yield f"{module_path(node)} {node.meta.get('custom')}"


def exchange_texts(partitions: Sequence[Partition]) -> dict[str, str]:
    """Return one item per graph; group names, which differ on a mesh, are left out."""
    return {
        f"exchanges of the {direction}" + (f" {number}" if number else ""): _text(graph)
        for number, partition in enumerate(partitions)
        for direction, graph in zip(("forward", "backward"), partition, strict=True)
    }


def _text(module: fx.GraphModule) -> str:
    words = [_word(node) for node in module.graph.nodes if _communicates(node)]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(word if n == 1 else f"{n} {word}" for word, n in runs) or "none"


def _communicates(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if communicates(node.target):
        return True
    is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_collective and "wait_tensor" not in str(node.target)


def _word(node: fx.Node) -> str:
    name = str(node.target).split(".")[1]
    reduction = node.args[1] if name.startswith("all_reduce") else None
    return name if reduction is None else f"{name} ({reduction})"
