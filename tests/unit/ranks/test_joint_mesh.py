"""The mesh of the sequence axis and another one, by meshes that were cut apart."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.errors import InputError
from cpcompile.ranks.joint_mesh import joint_mesh

MESH_AXES = {"cp": 2, "tp": 2}


def test_axes_of_one_mesh(mesh):
    joint = joint_mesh(mesh["cp"], mesh["tp"])
    assert joint.mesh.tolist() == [[0, 1], [2, 3]]
    assert joint.mesh_dim_names == ("cp", "tp")
    turned = joint_mesh(mesh["tp"], mesh["cp"])
    assert turned.mesh.tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("earlier", ["parameters", "tokens"])
def test_an_equal_axis_of_an_earlier_mesh(mesh, earlier):
    """DTensor's caches keep meshes, and hand out one that equals another's axis."""
    names = ("dp", "cp", "tp")
    other = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    assert other["tp"] == mesh["tp"] and other["cp"] == mesh["cp"]
    pair = (mesh["cp"], other["tp"])
    if earlier == "tokens":
        pair = (other["cp"], mesh["tp"])
    assert joint_mesh(*pair).mesh.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("names", [("cp", "tp"), ("a", "b")])
def test_other_ranks_or_names_are_refused(mesh, names):
    """Of a mesh whose axes take other ranks, or have no names of this one."""
    other = init_device_mesh("cpu", (1, 4), mesh_dim_names=names)
    with pytest.raises(InputError, match="needed two axes of one mesh"):
        joint_mesh(mesh["cp"], other[names[1]])


def test_the_axis_of_the_sequence_is_refused(mesh):
    with pytest.raises(InputError, match="which includes the axis of the sequence"):
        joint_mesh(mesh["cp"], mesh)
