"""Asks for proofs of token_wise, and checks them on plain tensors.

The check knows nothing of DTensor: what is proved has to give the same values for
tokens in another order, in that order where the result has tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

import cpcompile.backend  # noqa: F401  (has DTensor know what it needs)
from cpcompile.passes.flow.trial import Trial
from cpcompile.passes.graph.constant_arguments import Callee, MeshAxis
from cpcompile.passes.graph.sequence_tokens import TokenDim, token_dim
from cpcompile.passes.model.layouts.permutation_proof import PermutationProofs
from cpcompile.passes.placement.placement_calls import cp_replicated
from tests.support.bounds import OPERAND_SCALE, assert_close, assert_equal

TOKENS = 4
NOT_PROVED = "not proved"


@dataclass(frozen=True)
class Input:
    """A tensor, and where its tokens are; None if every rank has all of it."""

    x: Tensor
    dim: TokenDim | None = None
    batch: bool = False  # whether dim 0 is sharded on the mesh axis before
    plain: bool = False  # whether it stays a plain tensor


def seq(*shape: int, dim: int = 1, outer: int = 1) -> Input:
    """Random numbers that are sharded."""
    return Input(torch.randn(shape, dtype=torch.float64), TokenDim(dim, outer))


def full(*shape: int) -> Input:
    """Random numbers that are not."""
    return Input(torch.randn(shape, dtype=torch.float64))


def ids(*shape: int, dim: int | None = 1, outer: int = 1) -> Input:
    """Random numbers below four."""
    where = None if dim is None else TokenDim(dim, outer)
    return Input(torch.randint(0, 4, shape), where)


def reorder(x: Tensor, dim: TokenDim, order: Tensor) -> Tensor:
    """The tokens of `x` in another order."""
    inner = x.shape[dim.dim] // (dim.outer * len(order))
    split = x.unflatten(dim.dim, (dim.outer, len(order), inner))
    return split.index_select(dim.dim + 1, order).flatten(dim.dim, dim.dim + 2)


class Prover:
    """Asks for proofs on a mesh whose last axis shards the sequence."""

    def __init__(self, *shape: int) -> None:
        ranks = torch.arange(math.prod(shape)).view(shape)
        self.mesh = DeviceMesh("cpu", ranks)
        self.axis = len(shape) - 1
        self.on = MeshAxis(self.mesh, self.axis)
        self.fake_mode = FakeTensorMode()
        self.trial = Trial(self.fake_mode)
        self.proofs = PermutationProofs(self.mesh, self.axis, TOKENS, self.fake_mode)

    def distributed(self, given: Any) -> Any:
        """An argument as shard_graph hands it on: a fake DTensor."""
        if not isinstance(given, Input):
            return given
        with self.fake_mode:
            x = torch.empty_strided(
                given.x.shape, given.x.stride(), dtype=given.x.dtype
            )
            whole = [Replicate()] * self.mesh.ndim
            placements = [Shard(0) if given.batch else Replicate()] * self.axis
            placements.append(Replicate() if given.dim is None else given.dim.placement)
            full = DTensor.from_local(x, self.mesh, whole, run_check=False)
            return full.redistribute(placements=placements)

    def prove(self, call: Any, *inputs: Any, twin: Any = None) -> Any:
        """The constants of a proof, if it is true, or NOT_PROVED.

        twin: what does the same on plain tensors, if `call` does not.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        args = pytree.tree_unflatten([self.distributed(x) for x in leaves], spec)
        result, problem = self.trial.run(call, args, {})
        if problem is not None:
            args = (Callee(call), self.on, *args)
            call = cp_replicated
            result = self.trial.must_run(call, args, {})
        found = self.proofs.prove(call, args, {}, result)
        if found is None:
            return NOT_PROVED
        assert problem is None, "what is gathered has no proof"
        dims = {
            i: x.dim for i, x in enumerate(leaves) if isinstance(x, Input) and x.dim
        }
        dims |= found
        order = torch.randperm(TOKENS)
        while torch.equal(order, torch.arange(TOKENS)):
            order = torch.randperm(TOKENS)
        before = [x.x if isinstance(x, Input) else x for x in leaves]
        after = [
            reorder(x, dims[i], order) if i in dims else x for i, x in enumerate(before)
        ]
        results = (
            pytree.tree_leaves((twin or call)(*pytree.tree_unflatten(each, spec)))
            for each in (before, after)
        )
        for real, x, moved in zip(pytree.tree_leaves(result), *results, strict=True):
            dim = token_dim(real, self.axis, TOKENS)
            wanted = x if dim is None else reorder(x, dim, order)
            if wanted.dtype == torch.float64:  # sums are in another order
                assert_close("moved", moved, wanted, floor=OPERAND_SCALE)
            else:
                assert_equal("moved", moved, wanted)
        return found


DIM_CALLS = [
    "softmax", "cumsum", "cumprod", "logcumsumexp", "sum", "amax", "prod", "argmax",
    "sort", "argsort", "logsumexp", "std", "unbind", "diff", "any", "median", "cummax",
    "max", "min", "mode", "aminmax", "nansum",
]  # fmt: skip
# All sizes are equal: nothing but the dimension says what is a token.
CUBE_CALLS = {
    f"{name}({dim})": lambda x, _, name=name, dim=dim: getattr(torch, name)(x, dim=dim)
    for name in DIM_CALLS
    for dim in (-3, -2, -1, 1)
} | {
    "x + c": lambda x, c: x + c[0],
    "c[0] + x": lambda x, c: c[0][0] + x.mT,
    "c x": lambda x, c: c @ x,
    "x c": lambda x, c: x @ c,
    "x + x.T": lambda x, c: x + x.mT,
    "c bias": lambda x, c: (x + c[0]).softmax(-1),
    "x c + c": lambda x, c: torch.baddbmm(c, x, c),
    "tensordot": lambda x, c: torch.tensordot(x, c, 1),
    "c + c.T": lambda x, c: x + c[0] + c[0].T,
    "bsc,btc": lambda x, c: torch.einsum("bsc,btc->bst", x, c),
    "bsc,sd": lambda x, c: torch.einsum("bsc,sd->bcd", x, c[0]),
    "minus the first": lambda x, c: x - x[:, :1],
    "flat": lambda x, c: x.flatten().cumsum(0),
    "layer_norm": lambda x, c: F.layer_norm(x, (4, 4), c[0]),
    "pairs": lambda x, c: x[:, :, None] - x[:, None],
    "expanded": lambda x, c: c[0].expand(4, 4, 4) * x,
    "turned": lambda x, c: x.permute(1, 2, 0) * c,
}
