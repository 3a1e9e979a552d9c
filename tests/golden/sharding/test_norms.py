"""Norms over positions send sums where ranks share the positions out."""

import pytest
import torch

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, table
from tests.support.forms.normalised_forms import NORMS, WIDTH, Normalised

MESH_AXES = {"cp": 3}
SHAPE = (2, 3, 28, 12)


def captured(model, mesh, *shape, **options):
    torch.manual_seed(0)
    return capture(model, torch.randn(*shape), mesh=mesh, **options)


def test_of_batches_of_groups_and_of_samples(mesh):
    texts = {
        name: captured(Normalised(name), mesh, *SHAPE).lines(
            "= cp_channel", "= cp_group"
        )
        for name in ("batch", "group", "instance")
    }
    text = table({name: x.splitlines()[0] for name, x in texts.items()})
    assert_golden(
        text.replace("l_self_modules_norm_buffers_", ""),
        """\
batch: cp_channel_norm = cp_channel_norm(add, (0, 2, 3), (running_mean_, running_var_),
    0.1, cp_replicate_2, cp_replicate_3, 1e-05)  # [2, 8, 14, 6] S(2)
group: cp_group_norm = cp_group_norm(add, 2, cp_replicate_2, cp_replicate_3,
    1e-05)  # [2, 8, 14, 6] S(2)
instance: cp_channel_norm = cp_channel_norm(add, (2, 3), None, 0.1, None, None,
    1e-05)  # [2, 8, 14, 6] S(2)""",
    )


@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_gathered(mesh, name):
    text = captured(Normalised(name), mesh, *SHAPE).text
    assert text.count("_norm(") == 2
    assert "cp_replicated" not in text


@pytest.mark.parametrize("name", ["batch", "instance, kept"])
def test_what_is_normalised_by_kept_numbers_needs_no_sums(mesh, name):
    text = captured(Normalised(name).eval(), mesh, *SHAPE).text
    assert text.count(", (), (") == 2


def test_groups_of_samples_that_ranks_share_out_stay(mesh):
    norm = torch.nn.GroupNorm(2, WIDTH)
    shard = {"shard": {"input": 0}}
    text = captured(norm, mesh, 6, WIDTH, 10, **shard).text
    assert "cp_group_norm" not in text
    assert "group_norm(" in text
