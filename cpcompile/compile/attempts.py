"""Compile one Dynamo graph in the first of several ways that all ranks can go."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.compile.assembly import CompiledCallable, assemble
from cpcompile.compile.capture import captured, is_whole
from cpcompile.errors import (
    DropoutError,
    InputError,
    OptionError,
    RingOverlapError,
    TraceError,
)
from cpcompile.frontend.arguments import Frame, module_buffers
from cpcompile.frontend.changing_floats import begin_anew_without_floats
from cpcompile.frontend.inputs import classify_inputs, given_layout
from cpcompile.frontend.padding.pad_graph import pad_graph
from cpcompile.frontend.reducers import gradient_contracts
from cpcompile.frontend.request import Request
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.frontend.tokens_per_rank import TokensPerRank
from cpcompile.logs import warn_unsharded
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.effects import enables_gradients
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.passes.graph.sequence_tokens import Padding
from cpcompile.passes.joint.tiling.tiling_options import least_in_tiles
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.constant_buffers import without_changing
from cpcompile.passes.model.sharding.gather_graph import gather_graph
from cpcompile.passes.model.sharding.program_outputs import gather_limit
from cpcompile.passes.pipeline import MODEL, run_passes
from cpcompile.passes.whole_sequence import CAPTURED
from cpcompile.ranks.agreement import (
    Attempt,
    all_gather_text,
    attempt,
    check_agreement,
)
from cpcompile.settings import setting
from cpcompile.torch_patches import symbolic_tracing

T = TypeVar("T")

# Layers repeat, so that as many may fail one after another as there are layers.
_MAX_RETRIES = 64

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
        ways = [partial(self._for_all, length)]
        if is_whole(self._context(self.gm)):
            ways = [partial(self._for_shares, length)]
        elif not self.request.is_padded:
            # What pad_tokens changes may be what torch cannot do with symbols.
            ways.insert(0, partial(self._for_multiples, length))
        compiled = symbolic_tracing.attempt(
            ways, self.request.group, self.frame.name, _FOR_THE_USER
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
        tried = _attempt_with_fallbacks(
            self.request.group, self._with_fallbacks, _FOR_THE_USER, self._doing
        )
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

    def _for_multiples(
        self, length: torch.SymInt
    ) -> tuple[CompiledCallable, dict[str, str], Sequence[torch.SymInt]]:
        """Compile for the lengths that the ranks divide."""
        return *self._sharded(self.gm, self._context(self.gm, length)), (length,)

    def _for_shares(
        self, length: torch.SymInt
    ) -> tuple[CompiledCallable, dict[str, str], Sequence[torch.SymInt]]:
        """Compile for all lengths, with symbols for the tokens of the ranks."""
        module = copy.deepcopy(self.untouched)
        tokens = TokensPerRank.of(module.graph, length, self.request.group.size())
        ctx = self._context(module, length)
        compiled, alike = self._sharded(module, ctx, tokens=tokens)
        return tokens.around(compiled), alike, (length,)

    def _for_all(
        self, length: torch.SymInt
    ) -> tuple[CompiledCallable, dict[str, str], Sequence[torch.SymInt]]:
        """Compile for all lengths; inputs are padded to a multiple of the ranks."""
        module, mesh = copy.deepcopy(self.untouched), self.request.mesh
        ranks = mesh.size(self.request.axis)
        padding, around = pad_graph(module.graph, length, ranks, mesh.device_type)
        ctx = self._context(module, padding.symbol, padding)
        examples = [*self.example_inputs, None, None]
        compiled, alike = self._sharded(module, ctx, examples)
        return around(compiled, ctx), alike, (padding.symbol,)

    def _with_fallbacks(
        self, fallback_calls: dict[str, str]
    ) -> tuple[CompiledCallable, dict[str, str]]:
        module = copy.deepcopy(self.untouched) if fallback_calls else self.gm
        ctx = self._context(module)
        ctx.findings.fallback_calls.update(fallback_calls)
        return self._sharded(module, ctx)

    def _unsharded(self) -> tuple[CompiledCallable, dict[str, str]]:
        gm = self.untouched
        ctx = self._context(gm)
        find_attention(gm.graph, ctx)
        why = str(self.problem)
        ctx.findings.calls = [
            dataclasses.replace(call, unsupported=why) for call in ctx.findings.calls
        ]
        gather_graph(gm.graph, ctx)
        gm.recompile()
        return self._assembled(gm, ctx, self.example_inputs, ())

    def _sharded(
        self,
        module: fx.GraphModule,
        ctx: Context,
        examples: Sequence[Any] | None = None,
        tokens: TokensPerRank | None = None,
    ) -> tuple[CompiledCallable, dict[str, str]]:
        """Compile; return the program and what must be the same on every rank."""
        joint = is_whole(ctx)
        runs = run_passes(module, CAPTURED if joint else MODEL, ctx)
        if joint:
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
        padding: Padding | None = None,
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
            padding=padding,
            compare=lambda items: check_agreement(request.group, items, doing),
            all_gather_text=lambda text: all_gather_text(request.group, text, doing),
        )


def _attempt_with_fallbacks(
    group: ProcessGroup,
    make: Callable[[dict[str, str]], tuple[T, dict[str, str]]],
    final: tuple[type[Exception], ...],
    doing: str,
) -> Attempt[T]:
    """Run `agreement.attempt` as often as it ends with a call that can be gathered.

    A call's backward may meet a gradient in a form that its trial did not try, and only
    AOTAutograd sees that. Then the passes run once more on the untouched graph, and
    compute that call on gathered tensors. Uneven shards may differ on the ranks, and so
    may what they cannot do: what one rank has to gather, all gather.

    Args:
        make: takes the calls to gather, by `name_origin`, with the reason for each.
    """
    gathered: dict[str, str] = {}
    for _ in range(_MAX_RETRIES):
        to_gather = dict(gathered)
        tried = attempt(group, lambda: make(to_gather), final, doing)  # noqa: B023
        if tried.problem is None:
            return tried
        new_calls = _of_all_ranks(group, tried.problem, doing)
        if new_calls.keys() <= gathered.keys():
            return tried
        gathered |= new_calls
    return tried


def _of_all_ranks(
    group: ProcessGroup, problem: Exception, doing: str
) -> dict[str, str]:
    mine = {}
    if isinstance(problem, TraceError):
        mine = {problem.call: problem.reason}
    texts = all_gather_text(group, json.dumps(mine), doing)
    return {k: v for text in texts for k, v in json.loads(text).items()}
