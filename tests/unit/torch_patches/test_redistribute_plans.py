"""Plans of redistributions are made once, also while DTensor is traced."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute

from cpcompile.torch_patches import redistribute_plans
from tests.golden.capture import fake_group


def test_equal_plans_are_made_once():
    redistribute_plans._kept.cache_clear()
    with fake_group(ranks=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        specs = [
            DTensor.from_local(torch.ones(4, 4), mesh, x, run_check=False)._spec
            for x in ((Shard(0), Shard(1)), (Shard(0), Replicate()))
        ]
        right = _redistribute._gen_transform_infos_non_cached(*specs)
        with redistribute_plans.plans_are_kept():
            found = [
                _redistribute._gen_transform_infos_non_cached(*specs) for _ in range(3)
            ]
    assert found[0] == right
    assert found[1] is found[0] and found[2] is found[0]
    assert redistribute_plans._kept.cache_info().misses == 1
