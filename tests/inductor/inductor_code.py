"""The code that Inductor makes of a call, without other ranks."""

import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from tests.cpu.attention_cases import Attended, AttentionCase, make_inputs
from tests.golden.capture import fake_group


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def compiled(mesh):
    shard = {"query": 2, "key": 2, "value": 2}
    options = {"mesh": mesh, "shard": shard, "strategy": "ring"}
    return torch.compile(attend, backend="cp", fullgraph=True, options=options)


def train(function, case):
    *leaves, grad = make_inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, grad))


def codes_of(ranks, *cases, unroll="auto"):
    """Results and generated modules of each case, in a group that exchanges nothing."""
    with (
        fake_group(0, ranks),
        inductor_config.patch(fx_graph_cache=False),
        config.patch(unroll=unroll),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        return [
            run_and_get_code(lambda case=case: train(compiled(mesh), case))
            for case in cases
        ]


def check_rings_are_operators():
    """In two lengths, of which a warning is given once."""
    cases = AttentionCase(seq=16), AttentionCase(seq=24)
    for _, (forward, backward) in codes_of(2, *cases, unroll=8):
        assert forward.count("torch.ops.cp.ring_attention.default(") == 1
        assert backward.count("torch.ops.cp.ring_attention_backward.default(") == 1
        for code in (forward, backward):
            assert "cp.ring_shift.default(" not in code
            assert "cp.attention_step" not in code
