"""Compile a local graph with Inductor: unrolled rings, our lowerings, kept order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

# The one call of Inductor; seen in 2.11 to 2.14.
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.benchmarking import benchmarker

from cpcompile import config
from cpcompile.accounting.graph_account import Kind
from cpcompile.accounting.read import Accounting
from cpcompile.compile.autotune_kernel import fastest_kernel
from cpcompile.compile.capture import decompositions
from cpcompile.compile.compile_folded import compile_folded
from cpcompile.compile.overlap import check_overlap, keep_order
from cpcompile.compile.ring_probe import ring_problem
from cpcompile.compile.torch_cache import sources_digest
from cpcompile.geometry.lengths import expected, is_symbol
from cpcompile.kernels.choice import StepKernel, step_kernel, why_no_flash
from cpcompile.logs import warn_once
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.step import lowering
from cpcompile.passes.graph.calls import canonical_call
from cpcompile.passes.graph.nodes import all_nodes
from cpcompile.passes.joint.tiling.tile_tokens import NO_TILES, Tiling
from cpcompile.passes.local.expand_ring import (
    RINGS,
    Unrolling,
    expand_ring,
    has_mask,
    ring_group,
)
from cpcompile.passes.local.folding.folding_options import Folding
from cpcompile.passes.local.send_in_buckets import (
    find_buckets,
    has_own_settings,
    send_in_buckets,
)
from cpcompile.passes.pipeline import JOINT, WHOLE, run_passes
from cpcompile.passes.placement.gathered_parameters import gathered_input
from cpcompile.passes.whole.edges import Edges
from cpcompile.passes.whole.localise import WholeProgram
from cpcompile.progress import phase
from cpcompile.settings import setting
from cpcompile.torch_patches import inductor_compat, inductor_lowerings
from cpcompile.torch_private.inductor import (
    CompiledFxGraph,
    inductor_config,
    select_decomp_table,
)

RingRanks = tuple[tuple[str, int, int], ...]


def compile_local(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    tiling: Tiling = NO_TILES,
    folding: Folding | None = None,
    accounting: Accounting | None = None,
    edges: Edges | None = None,
) -> Callable[..., Any]:
    """Compile `gm`, whose nodes work on local tensors or on DTensors inside of it.

    Args:
        gm, inputs: the graph and its fake inputs.
        mode: as in `torch.compile(mode=...)`.
        tiling: what runs tile by tile.
        folding: with whom repeated blocks become one function; None keeps them.
        accounting: what reads the graphs before Inductor changes them.
        edges: of a graph of the whole sequence; None if `gm` is local.

    Raises: RingOverlapError if `config.check_overlap` is set and it finds one.
    """
    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode is not None else {}
    if has_symbols(inputs):
        # What one rank finds in the cache, which the others fill, brings guards that
        # these do not have, and then no rank could keep the length symbolic.
        patches["fx_graph_cache"] = False
        # On a CPU torch (2.13) lays out every value for the sake of a convolution, and
        # fails to sort strides that are symbols; on GPUs it leaves these graphs alone.
        patches["layout_optimization"] = False
    earlier = inductor_config.joint_custom_pre_pass
    patches["joint_custom_pre_pass"] = _OnJointGraph(tiling, edges, earlier)
    gathers = any(gathered_input(node) for node in all_nodes(gm.graph))
    places = _places(gm.graph)
    unroll = setting("unroll")
    joins = False
    if problems := _problems(inputs, bool(places) and unroll != 0):
        # Without our place in it, Inductor's own order is the one of the graph.
        if hasattr(inductor_config, "reorder_for_peak_memory"):  # it may be what moved
            patches["reorder_for_peak_memory"] = False
        warn_once(
            f"torch {torch.__version__} has changed what cpcompile uses of Inductor: "
            f"{'; '.join(problems)}. Attention steps run as eager operators and rings "
            "are not unrolled: correct, but messages and computation may overlap less"
        )
    else:
        keep_order()
        lowering.register()
        earlier = inductor_config.post_grad_custom_pre_pass
        patches["post_grad_custom_pre_pass"] = _ExpandRing(unroll, places, earlier)
        joins = not has_own_settings()
        if joins:
            earlier = inductor_config.post_grad_custom_post_pass
            patches["post_grad_custom_post_pass"] = _Buckets(gathers, earlier)
    inductor_lowerings.keep_operands()
    inductor_lowerings.install()
    if gathers:
        folding = None  # parameters are gathered ahead, over the borders of blocks
    tag = torch.compiler.config.cache_key_tag + sources_digest()
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]  # made at run time
        inner = _inner_compile(folding, accounting, joins, edges is not None)
        return compile_fx(  # type: ignore[return-value]  # a graph's only
            gm,
            inputs,
            inner_compile=inner,
            config_patches=patches,
            decompositions=None if edges is None else decompositions(),
        )


def _problems(inputs: Sequence[Any], has_rings: bool) -> tuple[str, ...]:
    """Say what this torch has changed; a ring is tried only if there is one."""
    if (issues := inductor_compat.problems()) or not has_rings:
        return issues
    devices = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
    accelerators = sorted(devices - {"cpu", "meta"})
    problem = ring_problem(accelerators[0] if accelerators else "cpu")
    return () if problem is None else (problem,)


def _inner_compile(
    folding: Folding | None, accounting: Accounting | None, joins: bool, whole: bool
) -> Callable[..., Any]:
    """Return what compiles a forward or backward graph with Inductor, and checks it."""

    def compile_and_check(
        gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        if whole and not is_backward:
            # Shards are smaller than the inputs that AOTAutograd has traced.
            placeholders = gm.graph.find_nodes(op="placeholder")
            pairs = zip(placeholders, inputs, strict=True)
            inputs = [node.meta.get("val", x) for node, x in pairs]
        if whole:  # local calls are decomposed by Inductor's own table
            kwargs.pop("get_decomp_fn", None)
        direction = "backward" if is_backward else "forward"
        if accounting is not None:
            accounting.read(gm, is_backward, _joined(gm.graph) if joins else {})
        phase(f"Inductor, {direction} graph")

        def compile_graph(module: fx.GraphModule) -> Any:
            return compile_fx_inner(module, inputs, **kwargs)

        if folding is None:
            compiled = compile_graph(gm)
        else:
            compiled = compile_folded(gm, compile_graph, folding)
        # A graph without a call is no CompiledFxGraph but its own forward.
        if config.check_overlap and isinstance(compiled, CompiledFxGraph):
            check_overlap(compiled.source_code)
        return compiled

    return compile_and_check


def _joined(graph: fx.Graph) -> dict[Kind, list[list[fx.Node]]]:
    """Find what `send_in_buckets` will join."""
    buckets = find_buckets(graph, setting("gradient_bucket_megabytes"))
    return {
        Kind.ALL_REDUCE: buckets.reduced,
        Kind.REDUCE_SCATTER: buckets.scattered,
        Kind.ALL_GATHER: buckets.gathered,
    }


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Tell whether a size of an input is a symbol."""
    sizes = (x.shape if isinstance(x, torch.Tensor) else (x,) for x in inputs)
    return any(map(is_symbol, itertools.chain.from_iterable(sizes)))


def kernel_of(ring: fx.Node) -> str | None:
    """Name the kernel of a ring's steps: what is configured, or measured as fastest.

    None leaves it to each step.

    aten's flash attention on GPUs takes no mask, so that only rings without one are
    measured.
    """
    arguments = canonical_call(ring).arguments
    q, k, v = (arguments[name].meta["val"] for name in ("q", "k", "v"))
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    named: str | None = setting("step_kernel")
    measure = inductor_config.max_autotune and named is None
    if not (measure and kernel is StepKernel.TEMPLATE and torch.cuda.is_available()):
        return named
    no_flash = why_no_flash(q.device.type, q.dtype, max(q.shape[-1], v.shape[-1]))
    if no_flash is not None or has_mask(ring):
        return named
    shapes = [tuple(map(expected, x.shape)) for x in (q, k, v)]
    backward = RINGS[ring.target][1] == "backward"
    benchmark = benchmarker.benchmark_gpu
    return fastest_kernel(*shapes, q.dtype, q.device, backward, benchmark).value


def _places(graph: fx.Graph) -> RingRanks:
    """Return this process's rank and size in every group that a ring runs on."""
    groups = {ring_group(node) for node in all_nodes(graph)} - {None}
    named_groups = ((name, group_by_name(name)) for name in sorted(map(str, groups)))
    return tuple((name, group.rank(), group.size()) for name, group in named_groups)


class _OurPass(CustomGraphPass):
    """A pass of ours, after those that the user may have set."""

    def __init__(self, earlier: Any) -> None:
        several = isinstance(earlier, list | tuple)  # torch 2.13 takes these too
        self.earlier = tuple(earlier) if several else (earlier,) if earlier else ()

    def __call__(self, graph: fx.Graph) -> None:
        for earlier_pass in self.earlier:
            earlier_pass(graph)
        assert graph.owning_module is not None, "Inductor compiles modules"
        self.run(graph.owning_module)

    def run(self, gm: fx.GraphModule) -> None:
        raise NotImplementedError

    def key(self) -> tuple[Any, ...]:
        """Return what our pass depends on in addition to the graph."""
        raise NotImplementedError

    def uuid(self) -> Any | None:
        """Return what Inductor's cache has to tell apart; None prevents caching."""
        earlier = []
        for earlier_pass in self.earlier:
            key = (
                earlier_pass.uuid()
                if isinstance(earlier_pass, CustomGraphPass)
                else None
            )
            if key is None:
                return None
            earlier.append(key)
        return (sources_digest(), self.key(), tuple(earlier))


class _OnJointGraph(_OurPass):
    """The passes on the joint graph."""

    def __init__(self, tiling: Tiling, edges: Edges | None, earlier: Any) -> None:
        super().__init__(earlier)
        self.tiling, self.edges = tiling, edges

    def run(self, gm: fx.GraphModule) -> None:
        if self.edges is not None:
            program = WholeProgram(self.edges, select_decomp_table())
            run_passes(gm, WHOLE, program)
        run_passes(gm, JOINT, self.tiling)

    def key(self) -> tuple[Any, ...]:
        return self.tiling.key()


class _ExpandRing(_OurPass):
    """The pass expand_ring.

    `places` goes into the key of Inductor's cache: graphs are equal on all ranks before
    the pass, and not after it.
    """

    def __init__(self, limit: int | None, places: RingRanks, earlier: Any) -> None:
        super().__init__(earlier)
        self.limit = limit
        self.places = places

    def run(self, gm: fx.GraphModule) -> None:
        unrolling = Unrolling(self.limit, kernel_of)
        run_passes(gm, (expand_ring,), unrolling)

    def key(self) -> tuple[Any, ...]:
        return (
            self.limit,
            self.places,
            setting("step_kernel"),
            torch.get_float32_matmul_precision(),
            inductor_config.max_autotune,
        )


class _Buckets(_OurPass):
    """The pass send_in_buckets.

    gathers: whether parameters are gathered; each rank then has its own place in a
    bucket, and finds no other's program in Inductor's cache.
    """

    def __init__(self, gathers: bool, earlier: Any) -> None:
        super().__init__(earlier)
        self.megabytes: float | None = setting("gradient_bucket_megabytes")
        self.rank = dist.get_rank() if gathers else None

    def run(self, gm: fx.GraphModule) -> None:
        run_passes(gm, (send_in_buckets,), self.megabytes)

    def key(self) -> tuple[Any, ...]:
        return (self.megabytes, self.rank)
