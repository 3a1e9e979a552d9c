"""Lower the operators of a ring in Inductor: steps to templates, shifts to messages.

    attention_step, _backward   kernel "triton": registered TritonTemplates; under a
                                mask, and by other kernels: the operator itself
    ring_shift                  a collective, so that what is sent lives until the wait
    ring_wait                   wait_tensor

Note [The order of a ring]
The order in which messages are sent, computation is started and messages are waited for
decides whether they overlap, and Inductor's own passes, made for other graphs, undo it
(reordering for peak memory, which is on by default, waits at once for what was sent).
So the operators carry `after`, a tensor that has to be there before, and it becomes a
dependency of the scheduler: a step comes after the shift that it hides, a wait after
the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.choice import StepKernel
from cpcompile.kernels.configs import Kernel, architecture, configs, padded
from cpcompile.kernels.constants import (
    NO_MODIFIERS,
    RowLimits,
    dot_precision,
    step_constants,
    tensor_names,
)
from cpcompile.kernels.render import source
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.step.attention_step_backward import Parts
from cpcompile.torch_patches import inductor_compat as compat

Node = Any  # a node of Inductor's IR, or None


@functools.cache
def register() -> None:
    """Register the lowerings and the templates; once per process."""
    ops = torch.ops.cp
    for op, lowering in (
        (ops.attention_step.default, _lower_step),
        (ops.attention_step_backward.default, _lower_backward),
    ):
        compat.register_lowering(op, functools.partial(lowering, compat.fallback(op)))
    compat.register_lowering(ops.ring_shift.default, _lower_shift)
    compat.register_lowering(ops.ring_wait.default, _lower_wait)


def _lower_shift(
    tensors: list[Node], group: str, where: str, after: Node = None, distance: int = 1
) -> list[Node]:
    op = torch.ops.cp.ring_shift.default
    rest = (group, where) if distance == 1 else (group, where, None, distance)
    started: list[Node] = compat.ordered(
        lambda: compat.start_collective(op, tensors, *rest), after
    )
    return started


def _lower_wait(x: Node, after: Node, where: str) -> Node:
    return compat.wait(x, after)


def _lower_step(
    fallback: Callable[..., Any],
    q: Node,
    k: Node,
    v: Node,
    out: Node,
    lse: Node,
    *rest: Any,
) -> tuple[Node, Node]:
    step = _Step.read(*rest)
    if step is None:
        return fallback(q, k, v, out, lse, *rest)  # type: ignore[no-any-return]  # a node
    B, H, R, _ = q.get_size()
    device, size = q.get_device(), [B, H, R, v.get_size()[-1]]
    dtype = q.get_dtype() if step.final else torch.float32
    if step.computes_nothing(q, k):
        if out is None:
            out = compat.filled(size, 0.0, dtype, device)
            lse = compat.filled(size[:3], float("-inf"), torch.float32, device)
        return compat.converted(out, dtype), lse
    lse_out = compat.new_buffer(size[:3], torch.float32, device)
    accumulators = () if out is None else (out, lse)
    new_out = step.launch(
        Kernel.FORWARD,
        (q, k, v),
        operands=(q, k, v),
        accumulators=accumulators,
        layout=compat.fixed_layout(device, dtype, size),
        second_output=lse_out,
    )
    return new_out, lse_out


def _lower_backward(
    fallback: Callable[..., Any],
    grad: Node,
    q: Node,
    k: Node,
    v: Node,
    lse: Node,
    rows: Node,
    sums: Sequence[Node],
    parts: str,
    *rest: Any,
) -> list[Node]:
    operands, step = (grad, q, k, v, lse, rows), _Step.read(*rest)
    of_keys, wanted = Parts(parts) is Parts.DKDV, (Parts.DKDV, Parts.DQ)
    if step is None or Parts(parts) not in wanted:
        return fallback(*operands, sums, parts, *rest)  # type: ignore[no-any-return]  # nodes
    device, dtype = q.get_device(), q.get_dtype() if step.final else torch.float32
    sizes = [x.get_size() for x in ((k, v) if of_keys else (q,))]
    if step.computes_nothing(q, k):
        sums = sums or [compat.filled(size, 0.0, dtype, device) for size in sizes]
        return [compat.converted(x, dtype) for x in sums]
    others = [compat.new_buffer(size, dtype, device) for size in sizes[1:]]
    first = step.launch(
        Kernel.DKDV if of_keys else Kernel.DQ,
        (q, k, v),
        operands=operands,
        accumulators=tuple(sums),
        layout=compat.fixed_layout(device, dtype, sizes[0]),
        second_output=others[0] if others else None,
    )
    return [first, *others]


@dataclass(frozen=True)
class _Step:
    """A step by a template: what all operators of steps are told at their end.

    limits: with a node. Integers become literals of the kernel; those that are symbols
        came as a vector.
    """

    limits: RowLimits
    scale: float
    final: bool
    after: Node

    @classmethod
    def read(
        cls,
        extras: Sequence[Node],
        summary: Sequence[Node],
        upper: Node,
        visible: Sequence[Any],
        place: Sequence[int],
        spec: str,
        final: bool,
        kernel: str,
        after: Node = None,
    ) -> _Step | None:
        """Read the arguments; None for what is left to the operator."""
        if StepKernel(kernel) is not StepKernel.TEMPLATE:
            return None
        own = AttentionSpec.of_text(spec)
        if own.has_modifiers:
            return None
        numbers = [compat.static(n) for n in visible]
        limits = RowLimits(Visible.of_list(numbers), upper)
        return cls(limits, own.scale, final, after)

    def computes_nothing(self, q: Node, k: Node) -> bool:
        """Tell whether no row sees a key."""
        return self.limits.visible.is_empty or _is_empty(q, k)

    def launch(
        self,
        kernel: Kernel,
        qkv: tuple[Node, Node, Node],
        operands: tuple[Node, ...],
        accumulators: tuple[Node, ...],
        layout: Any,
        second_output: Node,
    ) -> Node:
        """Return the first output of a template, in the order that `after` sets."""
        return compat.ordered(
            lambda: _launch(
                kernel, qkv, operands, accumulators, self, layout, second_output
            ),
            self.after,
        )


def _is_empty(q: Node, k: Node) -> bool:
    return any(size == 0 for size in (*q.get_size()[:3], k.get_size()[2]))


def _launch(
    kernel: Kernel,
    qkv: tuple[Node, Node, Node],
    operands: tuple[Node, ...],
    accumulators: tuple[Node, ...],
    step: _Step,
    layout: Any,
    second_output: Node,
) -> Node:
    """Return the first output of a template, which also writes to `second_output`."""
    q, k, v = qkv
    limits, accumulate = step.limits, bool(accumulators)
    vectors = limits.tensors.values()
    inputs = [compat.prepared(x) for x in (*operands, *accumulators, *vectors)]
    mutated = [] if second_output is None else [second_output]
    names = tensor_names(
        kernel, accumulate=accumulate, limits=limits, changes=NO_MODIFIERS
    )
    B, H, R, D = q.get_size()
    G, K, E = k.get_size()[1], k.get_size()[2], v.get_size()[3]
    dims = compat.static(D), compat.static(E)
    candidates = configs(
        kernel, architecture(q.get_device()), q.get_dtype(), padded(max(dims))
    )
    if not torch._inductor.config.max_autotune:
        candidates = candidates[:1]
    choices: list[Any] = []
    for config in candidates:
        constants = step_constants(
            config=config,
            rows=R,
            keys=K,
            head_dim=dims[0],
            value_dim=dims[1],
            heads_per_kv=compat.static(H) // compat.static(G),
            limits=limits,
            accumulate=accumulate,
            scale=step.scale,
            precision=dot_precision(q.get_dtype()),
            divides=compat.is_multiple,
            changes=NO_MODIFIERS,  # a step with others is left to the operator
        )
        _template(kernel).maybe_append_choice(
            choices,
            input_nodes=inputs + mutated,
            layout=layout,
            mutated_inputs=mutated or None,
            call_sizes=[B, G, K] if kernel is Kernel.DKDV else [B, H, R],
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **constants,
        )
    make_input = {}
    if limits.upper is not None:
        make_input[names.index("UPPER")] = _every_key(compat.expected(K))
    name = f"cp_{kernel.value}"
    return compat.choose(name, choices, inputs + mutated, layout, make_input)


def _every_key(count: int) -> Callable[[Any], torch.Tensor]:
    """Return a function that makes upper limits to tune with: every key is seen."""

    def make(node: Node) -> torch.Tensor:
        rows = compat.expected(node.get_size()[0])
        return torch.full((rows,), count, dtype=torch.int32, device=node.get_device())

    return make


@functools.cache
def _template(kernel: Kernel) -> Any:
    grid = _grid_of_keys if kernel is Kernel.DKDV else _grid_of_rows
    return compat.make_template(f"cp_{kernel.value}", grid, source(kernel))


def _grid_of_rows(b: Any, h: Any, rows: Any, meta: Any, *, cdiv: Any) -> Any:
    return cdiv(rows, meta["BLOCK_M"]), b, h


def _grid_of_keys(b: Any, g: Any, keys: Any, meta: Any, *, cdiv: Any) -> Any:
    return cdiv(keys, meta["BLOCK_N"]), b, g
