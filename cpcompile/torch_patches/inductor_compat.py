"""Everything private of Inductor that cpcompile uses, in one place, with a probe each.

Seen in torch 2.11 and 2.13 to 2.15; where these differ, a comment says how.
`problems()` says what a version of torch has changed, before anything of it is used:
then steps of attention run as eager operators, and rings are not unrolled. What only a
compilation can tell, ring_probe.py finds out. Imports stand inside of the functions,
because Inductor is slow to import and may have moved any of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """One private symbol, "module:attribute path", and the parameters we give it."""

    symbol: str
    parameters: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Say what is not as expected, or return None."""
        module, _, path = self.symbol.partition(":")
        try:
            symbol: Any = importlib.import_module(module)
            for name in path.split("."):
                symbol = getattr(symbol, name)
        except (ImportError, AttributeError) as error:
            return f"{self.symbol}: {error}"
        if not self.parameters:
            return None
        accepted = inspect.signature(symbol).parameters
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            return None
        missing = [name for name in self.parameters if name not in accepted]
        return f"{self.symbol} takes no {', '.join(missing)}" if missing else None


_SELECT = "torch._inductor.select_algorithm"
_IR = "torch._inductor.ir"
_LOWERING = "torch._inductor.lowering"
_BUCKETING = "torch._inductor.fx_passes.bucketing"

PROBES = (
    Probe(f"{_SELECT}:TritonTemplate", ("name", "grid", "source")),
    Probe(
        f"{_SELECT}:TritonTemplate.generate",
        ("input_nodes", "layout", "call_sizes", "mutated_inputs", "num_warps"),
    ),
    Probe(f"{_SELECT}:TritonTemplate.maybe_append_choice", ("choices",)),
    Probe(f"{_SELECT}:SymbolicGridFn"),
    Probe(
        f"{_SELECT}:AlgorithmSelectorCache.__call__",
        ("choices", "input_nodes", "layout", "input_gen_fns", "return_multi_template"),
    ),
    Probe(f"{_SELECT}:autotune_select_algorithm"),
    Probe(f"{_LOWERING}:register_lowering", ("type_promotion_kind",)),
    Probe(f"{_LOWERING}:fallback_handler", ("add_to_fallback_set",)),
    Probe(f"{_LOWERING}:empty_strided", ("size", "stride", "dtype", "device")),
    Probe(f"{_LOWERING}:full", ("size", "fill_value", "dtype", "device")),
    Probe(f"{_LOWERING}:to_dtype", ("x", "dtype")),
    Probe(f"{_IR}:FixedLayout", ("device", "dtype", "size")),
    Probe(f"{_IR}:TensorBox.create"),
    Probe(f"{_IR}:ExternKernel.realize_input"),
    Probe(f"{_IR}:ExternKernel.require_contiguous"),
    Probe(f"{_IR}:Buffer.freeze_layout"),
    Probe(f"{_IR}:FallbackKernel"),
    Probe(f"{_IR}:_CollectiveKernel.create_out_of_place", ("kernel", "inputs")),
    Probe(f"{_IR}:_WaitKernel.create_wait", ("kernel", "inp")),
    *(
        Probe(f"{_BUCKETING}:{name}", ("insert_before", "wait_insertion_point"))
        for name in (
            "merge_all_reduce_bucket",
            "merge_reduce_scatter_bucket",
            "merge_all_gather_bucket",
        )
    ),
    Probe(f"{_BUCKETING}:has_mergeable_all_gather_convert_dtype"),
    Probe("torch._inductor.pattern_matcher:stable_topological_sort"),
    Probe("torch._inductor.graph:GraphLowering"),
    Probe("torch._inductor.graph:SubgraphLowering.__init__"),
    Probe("torch._inductor.sizevars:SizeVarAllocator.statically_known_true"),
    Probe("torch._inductor.sizevars:SizeVarAllocator.guard_int"),
    Probe("torch._inductor.sizevars:SizeVarAllocator.optimization_hint"),
    Probe("torch._inductor.virtualized:V"),
    Probe("torch._inductor.dependencies:StarDep", ("name",)),
    Probe("torch._inductor.dependencies:ReadWrites.with_read", ("dep",)),
    Probe(f"{_IR}:TemplateBuffer.extract_read_writes"),
    Probe(f"{_IR}:ExternKernel.get_read_writes"),
    Probe("torch._inductor.comms:contains_collective"),
    Probe("torch._inductor.compile_fx:compile_fx", ("inner_compile", "config_patches")),
    Probe("torch._inductor.compile_fx:compile_fx_inner"),
    Probe("torch._inductor.custom_graph_pass:CustomGraphPass"),
    Probe("torch._inductor.decomposition:select_decomp_table"),
    Probe("torch._inductor.config:post_grad_custom_pre_pass"),
    Probe("torch._inductor.config:reorder_for_peak_memory"),
    Probe("torch._inductor.runtime.benchmarking:benchmarker.benchmark_gpu"),
    Probe("torch._inductor:list_mode_options"),
)


@functools.cache
def problems() -> tuple[str, ...]:
    """List what this version of torch has changed, in words; () if nothing."""
    return tuple(filter(None, (probe.problem() for probe in PROBES)))


def graph() -> Any:
    """Return the GraphLowering that is being lowered."""
    from torch._inductor.virtualized import V

    return V.graph


def make_template(name: str, grid: Callable[..., Any], source: str) -> Any:
    """Make a TritonTemplate; names are global, so each is made once."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source)


def choose(
    name: str,
    choices: list[Any],
    inputs: list[Any],
    layout: Any,
    make_input: dict[int, Callable[[Any], torch.Tensor]],
) -> Any:
    """Return the fastest of the choices, as a node.

    A MultiTemplateBuffer would forget that a template writes to one of its inputs,
    hence return_multi_template=False. torch 2.11 returns the node, later ones a pair.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    result = autotune_select_algorithm(
        name,
        choices,
        inputs,
        layout,
        input_gen_fns=make_input or None,
        return_multi_template=False,
    )
    return result[0] if isinstance(result, tuple) else result


def prepared(x: Any) -> Any:
    """Return a tensor a template can read: in memory, with dense rows, layout frozen.

    See Note [What kernels rely on]; require_stride1 of Inductor is content with stride
    1 in any dimension. (TritonTemplate(always_freeze_layout=) does not exist in torch
    2.11.)
    """
    from torch._inductor.ir import ExternKernel

    x = ExternKernel.realize_input(x)
    if x.get_stride()[-1] != 1:
        x = ExternKernel.require_contiguous(x)
    x.freeze_layout()
    return x


def new_buffer(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Make an uninitialised tensor in memory, for the second output of a template."""
    from torch._inductor.lowering import empty_strided

    buffer = empty_strided(list(size), None, dtype=dtype, device=device)
    buffer.realize()
    return buffer


def filled(
    size: Sequence[Any], value: float, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return torch.full as a node."""
    from torch._inductor.lowering import full

    return full(list(size), value, dtype=dtype, device=device)


def converted(x: Any, dtype: torch.dtype) -> Any:
    """Return x in another dtype, as a node."""
    from torch._inductor.lowering import to_dtype

    return to_dtype(x, dtype)


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """Make a contiguous layout."""
    from torch._inductor.ir import FixedLayout

    return FixedLayout(device, dtype, list(size))


def ordered(make: Callable[[], Any], after: Any) -> Any:
    """Run `make()`, with the calls and templates it creates scheduled after `after`.

    Each of them says that it reads the tensor `after`, as torch's own waits say it of
    what is in flight (`_WaitKernel.get_read_writes`). The scheduler cannot tell that
    from a real read, so that no pass of Inductor that reorders for memory or for
    communication may undo it. torch's `control_deps` is weaker: the passes that reorder
    communication ignore it. Copies that `make` needs are not ordered. `after` may be
    None.
    """
    if after is None:
        return make()
    lowered = graph()
    after.realize()
    first = len(lowered.operations)
    result = make()
    for operation in lowered.operations[first:]:
        _reads_too(operation, after.get_name())
    return result


def _reads_too(operation: Any, name: str) -> None:
    """Let an operation of the graph say that it reads the buffer `name`, too."""
    from torch._inductor.dependencies import StarDep
    from torch._inductor.ir import TemplateBuffer

    # The scheduler asks a template for the one, calls for the other.
    is_template = isinstance(operation, TemplateBuffer)
    method = "extract_read_writes" if is_template else "get_read_writes"
    original = getattr(operation, method)

    @functools.wraps(original)
    def also(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).with_read(StarDep(name))

    setattr(operation, method, also)


def start_collective(op: Any, tensors: list[Any], *rest: Any) -> list[Any]:
    """Start a collective on tensors: what it reads lives until it is waited for."""
    from torch._inductor import ir

    tensors = [ir.ExternKernel.require_contiguous(x) for x in tensors]
    arriving: Any = ir._CollectiveKernel.create_out_of_place(op, tensors, *rest)
    return [ir.TensorBox.create(x) for x in arriving]


def wait(x: Any, after: Any) -> Any:
    """Wait for a result of `start_collective`, after `after`."""
    from torch._inductor import ir

    op = torch.ops._c10d_functional.wait_tensor.default
    ordered(lambda: ir._WaitKernel.create_wait(op, x), after)
    return x


def fallback(op: Any) -> Callable[..., Any]:
    """Return the lowering that calls the operator itself."""
    from torch._inductor.lowering import fallback_handler

    handler: Callable[..., Any] = fallback_handler(op, add_to_fallback_set=False)
    return handler


def register_lowering(op: Any, lowering: Callable[..., Any]) -> None:
    """Lower calls of `op` by `lowering`."""
    from torch._inductor import lowering as module

    module.register_lowering(op, type_promotion_kind=None)(lowering)


def is_multiple(size: Any, block: int) -> bool:
    """Tell whether a size, symbolic or not, is known to be a multiple of `block`."""
    if isinstance(size, int):
        return size % block == 0
    import sympy  # type: ignore[import-untyped]  # sympy ships no type information

    is_proved = graph().sizevars.statically_known_true(
        sympy.Eq(sympy.Mod(size, block), 0)
    )
    return bool(is_proved)


def static(size: Any) -> int:
    """Return the value of a size, guarded if it is symbolic."""
    return size if isinstance(size, int) else int(graph().sizevars.guard_int(size))


def expected(size: Any) -> int:
    """Return the value of a size to tune for."""
    return int(graph().sizevars.optimization_hint(size))
