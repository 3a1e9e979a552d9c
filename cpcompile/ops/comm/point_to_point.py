"""Messages between single ranks, in flight behind what is computed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cpcompile.ops.comm.communication import call_site, group_by_name


@dataclass(frozen=True)
class Message:
    """Tensors, contiguous, that go to or come from a rank of the group."""

    tensors: Sequence[Tensor]
    rank: int


@dataclass(frozen=True)
class InFlight:
    """Messages on their way; `sent` may not be written to before `wait`."""

    works: Sequence[Any]
    sent: Sequence[Message]
    received: Sequence[Message]
    where: str

    def wait(self) -> list[Sequence[Tensor]]:
        """The tensors of each message that was to come."""
        with call_site(self.where):
            for work in self.works:
                work.wait()
        return [message.tensors for message in self.received]


def exchange(
    sent: Sequence[Message], received: Sequence[Message], group: str, where: str
) -> InFlight:
    """Start to send and to receive; between two ranks messages keep their order.

    received: with tensors to be written to. where: what it belongs to, for messages.
    """
    pg = group_by_name(group)
    operations = [
        dist.P2POp(how, x, dist.get_global_rank(pg, message.rank), pg)
        for how, messages in ((dist.isend, sent), (dist.irecv, received))
        for message in messages
        for x in message.tensors
    ]
    with call_site(where):
        works = dist.batch_isend_irecv(operations) if operations else []
    return InFlight(works, sent, received, where)
