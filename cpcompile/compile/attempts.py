"""Compile one Dynamo graph in the first of several ways that all ranks can go."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import Replicate

from cpcompile.compile.assembly import CompiledCallable, assemble
from cpcompile.compile.capture import captured
from cpcompile.errors import (
    DropoutError,
    InputError,
    OptionError,
    RewriteError,
    RingOverlapError,
)
from cpcompile.frontend.arguments import Frame, module_buffers
from cpcompile.frontend.changing_floats import begin_anew_without_floats
from cpcompile.frontend.inputs import GATHERED, classify_inputs, given_layout
from cpcompile.frontend.reducers import gradient_contracts
from cpcompile.frontend.request import Request
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.frontend.tokens_per_rank import TokensPerRank
from cpcompile.logs import warn_unsharded
from cpcompile.passes.graph.context import Context, OutputPlacement
from cpcompile.passes.graph.effects import enables_gradients
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.passes.graph.nodes import fake_value, output_nodes
from cpcompile.passes.joint.tiling.tiling_options import least_in_tiles
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.constant_buffers import without_changing
from cpcompile.passes.pipeline import MODEL, run_passes
from cpcompile.passes.whole.program_outputs import gather_limit
from cpcompile.ranks.agreement import all_gather_text, attempt, check_agreement
from cpcompile.settings import setting
from cpcompile.torch_patches import symbolic_tracing

# Errors that no other way of compilation avoids.
_FOR_THE_USER = (InputError, OptionError, DropoutError, RingOverlapError)

_STRICT_NOTE = (
    "cpcompile: options={'strict': False} runs what cannot be sharded unsharded instead"
)


class Attempts:
    """The ways to compile one graph, and what went wrong on those that were tried.

    gm: Dynamo's own graph, whose inputs Dynamo reads; the first attempt works on it.
    untouched: a copy for later ones.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        request: Request,
        frame: Frame,
    ) -> None:
        self.gm = gm
        self.untouched = copy.deepcopy(gm)
        self.example_inputs = example_inputs
        self.request = request
        self.frame = frame
        self.problem: Exception | None = None
        self._doing = f"compiles {frame.name}"

    def compile(self) -> CompiledCallable:
        """Compile in the first way that gives a program; all ranks call this.

        Raises: RewriteError if strict; errors that no other way avoids.
        """
        ways = [self.for_any_rows, self.for_any_length, self.for_this_length]
        for attempted in ways:
            compiled = attempted()
            if compiled is not None:
                return compiled
        assert self.problem is not None, "an attempt has a result or a problem"
        begin_anew_without_floats(self.untouched.graph)
        if self.request.options.strict:
            self.problem.add_note(_STRICT_NOTE)
            raise self.problem
        warn_unsharded(self.frame.name, self.problem)
        return self.unsharded()

    def for_any_rows(self) -> CompiledCallable | None:
        """Compile one program for many numbers of rows; None if this is not done."""
        rows = self.request.rows
        if rows is None:
            return None

        def way() -> tuple[CompiledCallable, dict[str, str], Sequence[torch.SymInt]]:
            return *self._sharded(self.gm, self._context(self.gm)), (rows,)

        compiled = symbolic_tracing.attempt(
            [way], self.request.group, self.frame.name, _FOR_THE_USER
        )
        if compiled is None:
            self.request = dataclasses.replace(self.request, rows=None)
            self._fix_sizes()
        return compiled

    def for_any_length(self) -> CompiledCallable | None:
        """Compile one program for many lengths; None if this is not done."""
        length = self.request.length
        if length is None:
            return None
        compiled = symbolic_tracing.attempt(
            [partial(self._for_shares, length)],
            self.request.group,
            self.frame.name,
            _FOR_THE_USER,
        )
        if compiled is None:
            self._fix_sizes()
        return compiled

    def _fix_sizes(self) -> None:
        self.gm = self.untouched
        specialize_sizes(self.gm.graph)
        self.untouched = copy.deepcopy(self.gm)

    def for_this_length(self) -> CompiledCallable | None:
        """Compile the sharded program for the lengths of this call.

        If cpcompile refuses, or torch cannot compile, on whichever rank, the error is
        kept as the problem.
        """
        tried = attempt(self.request.group, self._for_sizes, _FOR_THE_USER, self._doing)
        self.problem = tried.problem
        return tried.made

    def unsharded(self) -> CompiledCallable:
        """Compile the graph as it is, on gathered inputs, for every rank."""
        # If only some ranks fail, they alone would have Dynamo trace again.
        tried = attempt(self.request.group, self._unsharded, (Exception,), self._doing)
        if tried.problem is not None:
            raise tried.problem
        assert tried.made is not None, "an attempt has a result or a problem"
        return tried.made

    def _for_shares(
        self, length: torch.SymInt
    ) -> tuple[CompiledCallable, dict[str, str], Sequence[torch.SymInt]]:
        """Compile for all lengths, with symbols for the tokens of the ranks."""
        module = copy.deepcopy(self.untouched)
        tokens = TokensPerRank.of(module.graph, length, self.request.group.size())
        ctx = self._context(module, length)
        compiled, alike = self._sharded(module, ctx, tokens=tokens)
        return tokens.around(compiled), alike, (length,)

    def _for_sizes(self) -> tuple[CompiledCallable, dict[str, str]]:
        return self._sharded(self.gm, self._context(self.gm))

    def _unsharded(self) -> tuple[CompiledCallable, dict[str, str]]:
        gm = self.untouched
        ctx = self._context(gm)
        find_attention(gm.graph, ctx)
        why = str(self.problem)
        ctx.findings.calls = [
            dataclasses.replace(call, unsupported=why) for call in ctx.findings.calls
        ]
        for node, graph_input in ctx.inputs.items():
            if graph_input.chunks is not None:
                raise RewriteError(
                    f"{node.name} is this rank's chunk of the tokens, of which tensor "
                    "parallelism has another on each rank, and the graph cannot be "
                    "sharded; needed options={'strict': True}, which says why"
                )
        ctx.leave_other_axes()
        gathers = any(x.kind in GATHERED for x in ctx.inputs.values())
        whole = OutputPlacement((Replicate(),) * ctx.mesh.ndim, None, None)
        ctx.findings.outputs = [
            whole if gathers and isinstance(fake_value(x), Tensor) else None
            for x in output_nodes(gm.graph)
        ]
        return self._assembled(gm, ctx, self.example_inputs, ())

    def _sharded(
        self,
        module: fx.GraphModule,
        ctx: Context,
        examples: Sequence[Any] | None = None,
        tokens: TokensPerRank | None = None,
    ) -> tuple[CompiledCallable, dict[str, str]]:
        """Compile; return the program and what must be the same on every rank."""
        runs = run_passes(module, MODEL, ctx)
        captured(module.graph, ctx)
        examples = self.example_inputs if examples is None else examples
        if tokens is not None:
            examples = [*examples, *tokens.write(module.graph, ctx)]
        compiled, exchanges = self._assembled(module, ctx, examples, runs)
        counts = ", ".join(f"{run.name} {run.rewrites}" for run in runs)
        alike = ctx.plan_texts() | {"rewrites": counts} | exchanges
        alike["gradients"] = gradient_contracts(ctx)
        return compiled, alike

    def _assembled(
        self,
        module: fx.GraphModule,
        ctx: Context,
        examples: Sequence[Any],
        runs: tuple[PassRun, ...],
    ) -> tuple[CompiledCallable, dict[str, str]]:
        options = self.request.options
        return assemble(module, ctx, examples, options, self.frame, runs)

    def _context(
        self,
        module: fx.GraphModule,
        length: torch.SymInt | None = None,
    ) -> Context:
        request, options, doing = self.request, self.request.options, self._doing
        inputs = classify_inputs(
            module.graph, request.named, options, self.frame, request.mesh
        )
        buffers = module_buffers(module.graph)
        return Context(
            mesh=request.mesh,
            axis=request.axis,
            inputs=inputs,
            buffers=without_changing(buffers, self.frame.code),
            profile=request.profile,
            strategy=options.strategy,
            mixer_strategy=options.mixers,
            layout=given_layout(inputs, options),
            memory_budget=setting("memory_budget"),
            degrees=request.degrees,
            tie_fraction=setting("tie_fraction"),
            whole_mask_share=setting("whole_mask_share"),
            strict=options.strict,
            gather_limit=gather_limit(module, setting("gather_outputs_megabytes")),
            later_bytes=least_in_tiles(options),
            keeps_layout=options.local_view,
            backward=torch.is_grad_enabled() or enables_gradients(module.graph),
            length=length,
            rows=request.rows,
            compare=lambda items: check_agreement(request.group, items, doing),
            all_gather_text=lambda text: all_gather_text(request.group, text, doing),
        )
