"""Norms over positions send sums where ranks share the positions out."""

import pytest
import torch

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.support.forms.normalised_forms import NORMS, WIDTH, Normalised

in_three = pytest.mark.parametrize("mesh_of", [3], indirect=True)
SHAPE = (2, 3, 28, 12)


def captured(model, mesh, *shape, **options):
    torch.manual_seed(0)
    return capture(model, torch.randn(*shape), mesh=mesh, **options)


@in_three
def test_of_batches_of_groups_and_of_samples(mesh_of):
    found = [
        captured(Normalised(name), mesh_of, *SHAPE).lines(
            "channel_norm(", "group_norm("
        )
        for name in ("batch", "group", "instance")
    ]
    assert_golden(
        "\n".join(found),
        """\
cp_channel_norm = cp_channel_norm(add, (0, 2, 3),
    (l_self_modules_norm_buffers_running_mean_,
    l_self_modules_norm_buffers_running_var_), 0.1, cp_replicate_2, cp_replicate_3,
    1e-05)  # [2, 8, 14, 6] S(2)
cp_channel_norm_1 = cp_channel_norm(conv2d_1, (0, 2, 3),
    (l_self_modules_again_buffers_running_mean_,
    l_self_modules_again_buffers_running_var_), 0.1, cp_replicate_6, cp_replicate_7,
    1e-05)  # [2, 8, 14, 6] S(2)
cp_group_norm = cp_group_norm(add, 2, cp_replicate_2, cp_replicate_3,
    1e-05)  # [2, 8, 14, 6] S(2)
cp_group_norm_1 = cp_group_norm(conv2d_1, 2, cp_replicate_6, cp_replicate_7,
    1e-05)  # [2, 8, 14, 6] S(2)
cp_channel_norm = cp_channel_norm(add, (2, 3), None, 0.1, None, None,
    1e-05)  # [2, 8, 14, 6] S(2)
cp_channel_norm_1 = cp_channel_norm(conv2d_1, (2, 3), None, 0.1, None, None,
    1e-05)  # [2, 8, 14, 6] S(2)""",
    )


@in_three
@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_gathered(mesh_of, name):
    text = captured(Normalised(name), mesh_of, *SHAPE).text
    assert text.count("_norm(") == 2
    assert "cp_replicated" not in text


@in_three
@pytest.mark.parametrize("name", ["batch", "instance, kept"])
def test_what_is_normalised_by_kept_numbers_needs_no_sums(mesh_of, name):
    text = captured(Normalised(name).eval(), mesh_of, *SHAPE).text
    assert text.count(", (), (") == 2


@in_three
def test_groups_of_samples_that_ranks_share_out_stay(mesh_of):
    norm = torch.nn.GroupNorm(2, WIDTH)
    shard = {"shard": {"input": 0}}
    text = captured(norm, mesh_of, 6, WIDTH, 10, **shard).text
    assert "cp_group_norm" not in text
    assert "group_norm(" in text
