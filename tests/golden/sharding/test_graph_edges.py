"""How results leave the sharded graph."""

import torch
from torch.distributed.tensor import Shard

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV, make_qkv, sdpa


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def test_outputs_that_stay_sharded(mesh):
    """The local part leaves the graph; the backend makes it a DTensor again."""
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(
        attend, *inputs, mesh=mesh, shard=QKV, gather_outputs_megabytes=0
    )
    assert_golden(
        captured.lines("cp_to_local", "cp_gather"),
        """\
cp_to_local = cp_to_local(getitem, (S(2),))  # [2, 4, 2, 8]
return (cp_to_local,)""",
    )
    (placement,) = captured.ctx.findings.outputs
    assert placement is not None
    assert placement.placements == (Shard(2),)
    assert placement.shape == (2, 4, 16, 8)
    assert captured.ctx.findings.gathered_results == []


def test_outputs_that_are_gathered(mesh):
    captured = capture(attend, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV)
    assert captured.ctx.findings.outputs == [None]
    assert captured.ctx.findings.gathered_results == ["getitem [2, 4, 16, 8]"]


def test_plain_outputs_are_neither(mesh):
    def with_positions(q, k, v):
        return attend(q, k, v), torch.arange(16)

    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(
        with_positions, *inputs, mesh=mesh, shard=QKV, gather_outputs_megabytes=0
    )
    assert captured.text.endswith("return (cp_to_local, arange)")
    assert captured.ctx.findings.outputs[1] is None
