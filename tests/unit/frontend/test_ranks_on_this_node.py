"""How many ranks of an axis are on one node, as the launcher started them."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.frontend.machine import ranks_on_this_node
from tests.golden.capture import fake_group

ORDERS = [
    ("4", [0, 1, 2, 3, 4, 5, 6, 7], 4),
    ("8", [0, 1, 2, 3, 4, 5, 6, 7], 8),
    ("2", [0, 1, 4, 5], 2),
    ("4", [0, 4, 1, 5], None),  # each neighbour is on the other node
    ("2", [0, 2, 1, 3], None),
    ("1", [0, 2, 1, 3], 1),
    ("", [0, 1], None),
]


@pytest.mark.parametrize(("local", "order", "near"), ORDERS)
def test_they_have_to_follow_each_other(monkeypatch, local, order, near):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(
        torch.distributed, "get_process_group_ranks", lambda group: order
    )
    with fake_group(ranks=8):
        mesh = DeviceMesh("cpu", list(range(8)))
        assert ranks_on_this_node(mesh, 0) == near
