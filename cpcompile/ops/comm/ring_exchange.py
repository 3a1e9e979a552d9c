"""cp::ring_shift and cp::ring_wait: a message around the ring, in flight in between.

    arriving = ring_shift([k, v], group, where)      to the next, from the previous rank
    ...                                              what hides it
    k, v = [ring_wait(x, after) for x in arriving]

The works of a shift are registered for the tensors that arrive, as functional
collectives do it, so that torch's own wait_tensor waits for them, in a compiled graph
too. Between shift and wait neither what was sent may be written to nor what arrives be
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.ops.comm.communication import call_site, group_by_name
from cpcompile.torch_private.distributed import register_work

NOTHING_TO_HIDE_IT = ", behind no step"  # the end of `where` if no kernel hides a shift


@torch.library.custom_op("cp::ring_shift", mutates_args=())
def ring_shift(
    tensors: Sequence[Tensor],
    group: str,
    where: str,
    after: Tensor | None = None,
    distance: int = 1,
) -> list[Tensor]:
    """Send `tensors` to the next rank of `group`; return what the previous one sends.

    Args:
        tensors: of one shape and dtype on all ranks.
        group: name of the process group.
        where: what the exchange belongs to, for messages.
        after: in a compiled graph the shift comes after what computes this; not read.
        distance: how many ranks after this one the next is, and before it the previous.

    Returns: tensors like the arguments, to be read after cp::ring_wait only.

    Raises: torch's error with `where` as a note, if the exchange cannot be started.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    following = dist.get_global_rank(pg, (rank + distance) % ranks)
    previous = dist.get_global_rank(pg, (rank - distance) % ranks)
    tensors = [x.contiguous() for x in tensors]  # Note [What kernels rely on]
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, following, pg) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, previous, pg) for x in received]
    with call_site(f"{where}, rank {rank} of {ranks} in group {group!r}"):
        works = dist.batch_isend_irecv(sends + receives)
    # NCCL gives one work for all messages, which may be waited for often. gloo gives
    # one for each send and then for each receive, to be waited for once: what was sent
    # as the i-th is free when the i-th has arrived, which is what Inductor takes for
    # granted.
    if len(works) == 1:
        works *= len(received)
    owners = received * (len(works) // len(received))
    for owner, work in zip(owners, works, strict=True):
        register_work(owner, work)
    return received


@ring_shift.register_fake
def _(tensors: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


# Like _c10d_functional.wait_tensor it returns its argument, which no schema of a
# functional operator can say; hence not a custom_op.
_library = torch.library.Library("cp", "FRAGMENT")
_library.define("ring_wait(Tensor x, Tensor? after, str where) -> Tensor")


def ring_wait(x: Tensor, after: Tensor | None, where: str) -> Tensor:
    """Wait until `x`, a result of cp::ring_shift, has arrived; return it.

    In a compiled graph the wait comes after what computes `after`, which is not read.

    Raises: torch's error with `where` as a note, if the exchange failed.
    """
    with call_site(where):
        arrived: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return arrived


_library.impl("ring_wait", ring_wait, "CompositeExplicitAutograd")


def _fake_wait(x: Tensor, after: Tensor | None, where: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


torch.library.register_fake("cp::ring_wait", _fake_wait, lib=_library)
