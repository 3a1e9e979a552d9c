"""Attention under a mask on several ranks, and what it is compared with.

The reference is aten's math kernel in one process in float64 with a dense mask; see
Note [Derived tolerances] in attention_cases.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.mask_cache import put_mask
from cpcompile.ops.attention_spec import MASK_FIELDS
from cpcompile.ops.step.dropout import SEED_LIMIT, Dropout
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.cpu.attention_cases import (
    AttentionCase,
    RankCase,
    make_inputs,
    sequence_mesh,
    tolerance,
)
from tests.cpu.masks import BATCH, HEADS, MASKS, Fields
from tests.support.attention_calls import spec_and_extras
from tests.support.bounds import check, deviation
from tests.support.position_biases import of_pairs


@dataclass(frozen=True)
class MaskedCase(RankCase):
    """One attention call under the mask of a name in MASKS, or of "none"."""

    mask: str = "window"
    strategy: str = "ring"
    dtype: torch.dtype = torch.float32
    world: int = 2
    seq: int = 64
    kv_seq: int | None = None  # None: that of the queries
    kv_heads: int = HEADS
    value_dim: int = 16
    layout: Layout = Layout.CONTIGUOUS
    bias_grad: bool = True
    known: bool = False  # whether the operator is told what its mask says
    ulysses: int = 2  # of a hybrid; all ranks if it does not divide them
    inner: Literal["ulysses", "ring"] = "ulysses"
    softcap: float = 0.0
    dropout_p: float = 0.0
    head_groups: int = 1

    def groups(self, mesh: DeviceMesh, axis: int = 0) -> tuple[str | bool, ...]:
        """Which groups the operator works on, where `axis` has the sequence."""
        group = mesh.get_group(axis).group_name
        if self.strategy != "hybrid":
            return (group,)
        groups = hybrid_groups(mesh, axis, self.degrees)
        return (group, groups.ulysses, groups.ring, self.inner == "ulysses")

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of out, whole."""
        return make_inputs(
            AttentionCase(
                kv_heads=self.kv_heads,
                dtype=self.dtype,
                seq=self.seq,
                kv_seq=self.kv_seq,
                heads=HEADS,
                value_dim=self.value_dim,
                batch=BATCH,
            )
        )

    def seeds(self) -> Tensor:
        """Of dropout, whole."""
        generator = torch.Generator().manual_seed(5)
        return torch.randint(SEED_LIMIT, (BATCH, HEADS), generator=generator)

    def fields(self) -> Fields:
        """The mask, whole; a bias is in the dtype of the operands."""
        kv_len = self.seq if self.kv_seq is None else self.kv_seq
        if self.mask == "none":
            return Fields()
        last = torch.arange(self.seq) + kv_len - self.seq
        mask = MASKS[self.mask](last, self.seq, kv_len)
        if mask.bias is None or mask.bias.dtype == torch.bool:
            return mask
        low = torch.finfo(self.dtype).min
        bias = mask.bias.masked_fill(mask.bias.isfinite() & (mask.bias < -1e9), low)
        return Fields(
            mask.key_ranges,
            mask.q_segment_ids,
            mask.kv_segment_ids,
            bias.to(self.dtype),
        )


def expected(case: MaskedCase, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv and, for a floating bias, dbias; in one process in `dtype`."""
    q, k, v, grad = (x.to(dtype) for x in case.operands())
    mask = case.fields()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hidden = ~mask.visible(q.shape[2], k.shape[2])
    added = torch.zeros(hidden.shape, dtype=dtype)
    if mask.bias is not None and mask.bias.is_floating_point():
        bias = mask.bias.to(dtype).requires_grad_()
        leaves.append(bias)
        added = of_pairs(bias, q.shape[2], k.shape[2])
    if case.softcap or case.dropout_p:
        out = _changed(case, *leaves[:3], added.masked_fill(hidden, -torch.inf))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            *leaves[:3],
            attn_mask=added.masked_fill(hidden, -torch.inf),
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _changed(case: MaskedCase, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a softcap and dropout, whose rows all see some key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    weights = (scores + mask).softmax(-1)
    if case.dropout_p:
        rows, keys = weights.shape[2:]
        dropout = Dropout(case.dropout_p, case.seeds(), torch.arange(rows))
        part = Block(0, rows, 0, keys, masked=True)
        weights = weights * dropout.factors(part, weights.dtype)
    return weights @ v


def run_masked(case: MaskedCase, backend: str | None = None) -> list[Tensor] | None:
    """`case` on all ranks of this process group; rank 0 returns whole tensors.

    backend: of torch.compile, for the call on DTensors; None is eager.
    """
    mesh = sequence_mesh(case.world)
    q, k, v, grad = case.operands()

    def arranged(x: Tensor) -> TokenLayout:
        return TokenLayout.of(case.layout, x.shape[2], case.world)

    leaves: list[Tensor] = [
        distribute_tensor(
            x[:, :, arranged(x).permutation()], mesh, [Shard(2)], src_data_rank=None
        ).requires_grad_()
        for x in (q, k, v)
    ]
    mask = case.fields()
    integers = [
        None
        if x is None
        else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        for x in (mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
    ]
    bias = mask.bias
    if bias is not None:
        placement = Shard(2) if bias.ndim == 4 else Replicate()
        bias = distribute_tensor(bias, mesh, [placement], src_data_rank=None)
        if bias.is_floating_point() and case.bias_grad:
            leaves.append(bias.requires_grad_())
    op = getattr(torch.ops.cp, f"{case.strategy}_attention")
    sizes, groups = [q.shape[2], k.shape[2]], case.groups(mesh)
    more: dict[str, Any] = {"layout": case.layout.value}
    if case.softcap:
        more["softcap"] = case.softcap
    more["head_groups"] = case.head_groups
    if case.dropout_p:
        placed = (case.seeds(), mesh, [Replicate()])
        seeds = DTensor.from_local(*placed, run_check=False)
        more |= {"dropout_p": case.dropout_p, "seeds": seeds}
    if case.known:
        whole = (mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
        more["mask_key"] = put_mask(whole, q.shape[2], k.shape[2])

    masks = zip(MASK_FIELDS, (bias, *integers), strict=True)
    spec, extras = spec_and_extras(q.shape[3] ** -0.5, **dict(masks), **more)

    def attend(q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> Tensor:
        out: Tensor
        out, _ = op(q, k, v, extras, sizes, spec, *groups)
        return out

    if backend is not None:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend=backend, fullgraph=True)
    out = attend(*leaves[:3], *extras)
    out_grad = distribute_tensor(
        grad[:, :, arranged(grad).permutation()], mesh, [Shard(2)], src_data_rank=None
    )
    grads = torch.autograd.grad(out, leaves, out_grad)
    wholes = (x.full_tensor() for x in (out.detach(), *grads))
    found = [  # a bias of positions has no tokens
        x if x.ndim == 3 else x[:, :, arranged(x).inverse()] for x in wholes
    ]
    return found if mesh.get_rank() == 0 else None


NAMES = ("out", "dq", "dk", "dv", "dbias")


def check_masked(case: MaskedCase, got: list[Tensor]) -> None:
    """Assert that `got` agrees with the reference; see Note [Derived tolerances]."""
    dtypes = (torch.float64, case.dtype, torch.float32)
    exact, in_dtype, in_float32 = (expected(case, dtype) for dtype in dtypes)
    found = []
    wanted = len(exact) if case.bias_grad else 4
    assert len(got) == wanted, f"{len(got)} results, not {wanted}"
    each = zip(NAMES, got, exact, in_dtype, in_float32, strict=False)
    for name, x, reference, rough, single in each:
        assert x.dtype == case.dtype, f"{name} has {x.dtype}"
        plain = (rough,) if case.dtype == torch.float64 else (rough, single)
        limit = max(tolerance(reference, one) for one in plain)
        found.append(deviation(name, x, reference, limit=limit))
    check(found)
