"""Where Triton is not installed, CPUs work as before and GPUs get aten's kernels."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys

    sys.modules["triton"] = None  # as if it could not be found or imported

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    import cpcompile as cp
    from cpcompile.kernels.choice import StepKernel, step_kernel
    from tests.support.bounds import OPERAND_SCALE, assert_close

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    q = torch.randn(1, 2, 32, 16, requires_grad=True)


    def attend(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


    options = {"mesh": mesh, "shard": {"q": 2}, "strategy": "ring"}
    cp.config.unroll = 8
    compiled = torch.compile(attend, backend="cp", options=options)
    out = compiled(q)
    outs = [out, attend(q.double()), attend(q)]
    grads = [torch.autograd.grad(x.sum(), q)[0] for x in outs]
    assert_close("out", *outs, floor=OPERAND_SCALE)
    assert_close("grad of q", *grads, floor=OPERAND_SCALE)
    print(cp.explain(compiled, q))
    assert step_kernel("cuda", torch.bfloat16, 64, 64) is StepKernel.FLASH
    dist.destroy_process_group()
"""


def test_cpu_and_vendor_paths_work():
    program = textwrap.dedent(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150
    )
    assert ran.returncode == 0, ran.stderr
    assert "aten_flash" in ran.stdout
    assert "triton is not installed (pip install triton)" in ran.stderr
