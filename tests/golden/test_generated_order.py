"""The generated code starts its communication in one order on every rank.

Shards of 37 tokens on 4 ranks have 10, 10, 10 and 7 tokens, so that Inductor meets
other sizes on the last rank.
"""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from tests.golden.capture import fake_group
from tests.models.small_gpt import SmallGPT

_COMMUNICATION = re.compile(
    r"torch\.ops\.((?:cp|_c10d_functional)\.(?!wait)\w+)\.default\("
)


def communication(rank: int, strategy: str) -> list[list[str]]:
    """Per generated module, the calls that communicate, in order."""
    with fake_group(rank, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        torch.manual_seed(0)
        model = SmallGPT(vocabulary=32, width=32, layers=2, context=64)
        options = {"mesh": mesh, "shard": {"tokens": 1, "labels": 1}}
        options |= {"strategy": strategy, "gather_outputs": False}
        step = torch.compile(model, backend="cp", options=options)
        tokens = torch.randint(0, 32, (1, 37))

        def train() -> None:
            step(tokens, tokens)[1].backward()

        _, codes = run_and_get_code(train)
    return [_COMMUNICATION.findall(code) for code in codes]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_first_and_last_rank_agree(strategy):
    first, last = communication(0, strategy), communication(3, strategy)
    assert first == last
    forward, backward = first
    assert forward.count(f"cp.{strategy}_attention") == 2
    assert backward.count(f"cp.{strategy}_attention_backward") == 2
    assert "_c10d_functional.all_reduce_" in backward
