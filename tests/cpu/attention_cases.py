"""What attention on sequence-sharded DTensors is compared with, and how closely.

A case says which attention to run, `run_case` runs it on the ranks of one set of
processes, `check` compares the gathered results with one process in float64.

Note [Derived tolerances]
The reference is F.scaled_dot_product_attention in one process in float64 on the same,
already rounded, inputs. float64 and float32 have the bounds of Note [Derived bounds] in
tests/support/bounds.py, of the largest value of the reference, or of the operands where
that is larger: a gradient that is zero, such as dq where each row sees one key, is a
difference of such values. The 16 bit dtypes may have twice the error that the same call
has in one process in that dtype, plus one ulp of the largest value: sums are float32 in
both, and rounded once. Where those cancel to zero they may have the error of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import cpcompile as cp
import cpcompile.ops  # registers the operators
from cpcompile import config
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.support import bounds
from tests.support.attention_calls import attention

SEQUENCE = Shard(2)

# Of q, k and v [B, H, S, D] on a mesh of two axes: one of both has the sequence.
TWO_AXES = [
    (Replicate(), Shard(2)),
    (Shard(0), Shard(2)),
    (Shard(1), Shard(2)),
    (Shard(2), Shard(1)),
]


class RankCase:
    """A call on `world` ranks, of which `ulysses` and `inner` make a hybrid."""

    world: int
    ulysses: int
    inner: str

    @property
    def degrees(self) -> CPDegrees:
        """The factors of a hybrid: `ulysses` ranks, or all if these do not divide."""
        ulysses = self.ulysses if self.world % self.ulysses == 0 else self.world
        return CPDegrees(ulysses, self.world // ulysses, self.inner)

    def __str__(self) -> str:
        """The fields that differ from their defaults, as an id for pytest."""
        changed = [
            f"{field.name}={getattr(self, field.name)}".replace("torch.", "")
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "defaults"


@dataclass(frozen=True)
class AttentionCase(RankCase):
    """One attention call: who computes it (`entry`, `strategy`), where, and on what.

    entry is "operator" (torch.ops.cp.*), "eager" (F.scaled_dot_product_attention) or
    what compiles the latter inside of "cp", "aot_eager" or "inductor".
    `ulysses` and `inner` say how a hybrid factorises the ranks, see CPDegrees. `layout`
    is of the operators; inputs and results are in the order of the sequence.
    """

    strategy: str = "ring"
    entry: str = "operator"
    causal: bool = True
    kv_heads: int = 4
    dtype: torch.dtype = torch.float32
    world: int = 2
    seq: int = 64
    kv_seq: int | None = None  # None: that of the queries
    heads: int = 4
    head_dim: int = 16
    value_dim: int | None = None  # None: head_dim
    batch: int = 2
    scale: float | None = None
    q_placement: Placement = SEQUENCE
    kv_placement: Placement = SEQUENCE
    ulysses: int = 2
    inner: str = "ulysses"
    layout: Layout = Layout.CONTIGUOUS
    head_groups: int = 1

    def token_layout(self, length: int) -> TokenLayout:
        """Which of so many tokens lie on which rank."""
        return TokenLayout.of(self.layout, length, self.world)


@dataclass(frozen=True)
class Attended:
    """The result of one attention and its gradients, all [B, heads, tokens, dim]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


Attend = Callable[[AttentionCase, Tensor, Tensor, Tensor], Tensor]


def make_inputs(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out: whole, seeded, equal in every process."""
    generator = torch.Generator().manual_seed(1234)
    keys = case.seq if case.kv_seq is None else case.kv_seq
    value_dim = case.head_dim if case.value_dim is None else case.value_dim

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(case.dtype)

    return (
        normal(case.batch, case.heads, case.seq, case.head_dim),
        normal(case.batch, case.kv_heads, keys, case.head_dim),
        normal(case.batch, case.kv_heads, keys, value_dim),
        normal(case.batch, case.heads, case.seq, value_dim),
    )


def attend_in_one_process(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> Attended:
    """Plain attention on whole tensors, computed in `dtype`."""
    q, k, v, grad = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *leaves, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, grad))


def check(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    causal: bool,
    scale: float | None,
    got: Attended,
) -> None:
    """Assert that `got` agrees with the reference; see Note [Derived tolerances]."""
    dtype = inputs[0].dtype
    exact = attend_in_one_process(inputs, causal, scale, torch.float64)
    plain = [attend_in_one_process(inputs, causal, scale, dtype)]
    if dtype != torch.float64:  # one order of sums may be lucky, and float32 may cancel
        with sdpa_kernel(SDPBackend.MATH):
            plain.append(attend_in_one_process(inputs, causal, scale, torch.float32))
    found = []
    for name in ("out", "dq", "dk", "dv"):
        x, reference = getattr(got, name), getattr(exact, name)
        assert x.dtype == dtype, f"{name} has {x.dtype}, the inputs have {dtype}"
        limit = max(tolerance(reference, getattr(each, name)) for each in plain)
        found.append(bounds.deviation(name, x, reference, limit=limit))
    bounds.check(found)


def tolerance(reference: Tensor, plain: Tensor) -> float:
    """The error allowed to a tensor that one process computes as `plain`."""
    if plain.dtype in (torch.float32, torch.float64):
        return bounds.bound(reference, plain, bounds.OPERAND_SCALE)
    ulp = torch.finfo(plain.dtype).eps * bounds.largest(reference)
    return 2 * bounds.largest(plain.double() - reference) + ulp


def lse_tolerance(dtype: torch.dtype, exact: Tensor, rough: Tensor) -> float:
    """Of a log-sum-exp, whose error is a relative one of the probabilities of its row.

    A 16 bit kernel rounds those to `dtype` anyway, so half an ulp is no loss.
    """
    if dtype in (torch.float32, torch.float64):
        return bounds.bound(exact, rough, bounds.OPERAND_SCALE)
    return torch.finfo(dtype).eps / 2


def check_case(case: AttentionCase, got: Attended) -> None:
    check(make_inputs(case), case.causal, case.scale, got)


def attend(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention that `case` names, on DTensors."""
    if case.entry == "operator":
        return call_operator(case, sequence_mesh(case.world), 0, q, k, v)
    given = {"is_causal": case.causal, "scale": case.scale}
    given |= {"enable_gqa": case.heads != case.kv_heads}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **given)

    if case.entry != "eager":
        how: Any = {"strategy": case.strategy, "inner": case.entry}
        call = torch.compile(call, backend="cp", fullgraph=True, options=how)
    return call(q, k, v)


def call_operator(
    case: AttentionCase, mesh: DeviceMesh, axis: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The cp:: operator of `case` on a mesh axis that shards the sequence."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    group = mesh.get_group(axis).group_name
    rest = (q.shape[2], k.shape[2], case.causal, scale, group)
    rest += hybrid_arguments(case, mesh, axis)
    out: Tensor
    given = {"layout": case.layout.value, "head_groups": case.head_groups}
    out, _ = attention(case.strategy)(q, k, v, *rest, **given)
    return out


def hybrid_arguments(
    case: AttentionCase, mesh: DeviceMesh, axis: int
) -> tuple[str | bool, ...]:
    """The groups that a hybrid takes after its own; of others none."""
    if case.strategy != "hybrid":
        return ()
    groups = hybrid_groups(mesh, axis, case.degrees)
    return groups.ulysses, groups.ring, case.inner == "ulysses"


def run_case(case: AttentionCase, attend: Attend = attend) -> Attended | None:
    """Run `case` on all ranks of this process group; rank 0 returns whole tensors."""
    mesh = sequence_mesh(case.world)
    q, k, v, grad = (
        x[:, :, case.token_layout(x.shape[2]).permutation()] for x in make_inputs(case)
    )
    placements = [case.q_placement, case.kv_placement, case.kv_placement]
    leaves = [
        distribute_tensor(x, mesh, [placement], src_data_rank=None).requires_grad_()
        for x, placement in zip((q, k, v), placements, strict=True)
    ]
    eager = case.strategy if case.entry == "eager" else config.eager_strategy
    with config.patch(eager_strategy=eager):
        out = attend(case, *leaves)
        assert isinstance(out, DTensor), f"the result is a {type(out)}"
        out_grad = distribute_tensor(grad, mesh, out.placements, src_data_rank=None)
        grads = torch.autograd.grad(out, leaves, out_grad)
    wholes = (x.full_tensor() for x in (out.detach(), *grads))
    whole = Attended(
        *(x[:, :, case.token_layout(x.shape[2]).inverse()] for x in wholes)
    )
    return whole if mesh.get_rank() == 0 else None


def distributed_inputs(case: AttentionCase, dim: int = 2) -> list[Tensor]:
    """`make_inputs` as DTensors that are all sharded on `dim`."""
    mesh = sequence_mesh(case.world)
    return [
        distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
        for x in make_inputs(case)
    ]


def run_on_grid(case: AttentionCase, attend: Callable[..., Tensor]) -> Attended:
    """`attend(q, k, v)` on DTensors of a mesh with the axes of `grid`."""
    mesh = grid(case.inner)
    *inputs, grad = (
        cp.shard(x, mesh, 2, mesh.mesh_dim_names) for x in make_inputs(case)
    )
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    return Attended(*(x.full_tensor() for x in (out.detach(), *grads)))


@functools.cache
def grid(inner: str) -> DeviceMesh:
    """Four ranks as two mesh axes, "ulysses" and "ring", of which one is inside."""
    names = ("ring", "ulysses") if inner == "ulysses" else ("ulysses", "ring")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@functools.cache
def sequence_mesh(world: int) -> DeviceMesh:
    """All ranks as one mesh axis "cp"; one mesh per process is enough."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


def compiled_on(
    world: int | DeviceMesh,
    model: Any,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Any,
) -> Any:
    """What backend "cp" makes of a model, in eager unless `inner` says otherwise."""
    mesh = sequence_mesh(world) if isinstance(world, int) else world
    given = {"mesh": mesh, "inner": "aot_eager", **options}
    how = {"dynamic": dynamic, "fullgraph": fullgraph}
    return torch.compile(model, backend="cp", options=given, **how)
