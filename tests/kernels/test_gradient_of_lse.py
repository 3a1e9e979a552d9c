"""The gradient of the log-sum-exp on the Triton templates, interpreted."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.log_sum_exps import attend, step_of_lse, whole


def run_on_templates(strategy: str, kind: str) -> dict[str, Tensor]:
    group = init_device_mesh("cpu", (1,)).get_group().group_name

    def call(q, k, v, given):
        return attend(strategy, kind, group, q, k, v, given)

    with config.patch(step_kernel="triton"):
        return step_of_lse(kind, torch.float32, call)


@pytest.mark.core("causal-ring", "softcap-all_gather")
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("kind", ["causal", "key_ranges", "softcap", "sinks"])
def test_against_autograd(interpreters, kind, strategy):
    (got,) = interpreters[1].run(run_on_templates, strategy, kind, timeout=170.0)
    exact, rough = (
        step_of_lse(kind, dtype, lambda *x: whole(kind, *x))
        for dtype in (torch.float64, torch.float32)
    )
    for name, x in exact.items():
        floor = OPERAND_SCALE if name.startswith("grad") else 0.0
        assert_close(name, got[name], x, rough[name], floor)
