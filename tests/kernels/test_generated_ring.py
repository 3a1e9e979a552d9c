"""The CUDA code of a whole ring, written and executed without a GPU."""

import functools
import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.compile import compile_local
from cpcompile.compile.overlap import check_overlap
from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.configs import STEP_KERNELS, configs
from cpcompile.ops.step import lowering
from cpcompile.ops.step.step_arguments import StepChunk
from cpcompile.torch_patches import inductor_compat as compat
from tests.golden.capture import fake_group
from tests.kernels.generated_code import generated_code
from tests.kernels.generated_module import run
from tests.support import bounds
from tests.support.attention_calls import rest
from tests.support.memory_orders import in_memory_order
from tests.support.this_torch import skip_if_cudnn_is_asked

HEADS, DIM = 4, 32


def attend(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def make_inputs(device, seq, dtype, heads=HEADS):
    torch.manual_seed(0)
    return tuple(
        torch.randn(1, n, seq, DIM, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, heads // 2, heads // 2)
    )


def code_of_rank(rank, ranks, seq, dtype, causal, **options):
    """What torch.compile(backend="cp") writes for one rank."""

    def compiler(fn):
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
        given = {"mesh": mesh, "shard": {"q": 2, "k": 2, "v": 2}, "strategy": "ring"}
        return torch.compile(fn, backend="cp", options=given | options, fullgraph=True)

    with skip_if_cudnn_is_asked():
        return generated_code(
            lambda q, k, v: attend(q, k, v, causal),
            functools.partial(make_inputs, seq=seq, dtype=dtype),
            compiler=compiler,
            rank=rank,
            ranks=ranks,
        )


def run_rank(codes, inputs, gradient):
    """Results and gradients of this rank; nothing may be left in flight."""
    results, found = run(codes[dist.get_rank()], inputs, (gradient,))
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    return [x.detach() for x in (*results, *found)]


def reference(inputs, gradient, causal, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = attend(*leaves, causal)
    return [out, *torch.autograd.grad(out, leaves, gradient.to(dtype))]


def check_ranks(answers, inputs, gradient, causal, dtype):
    """The error is that of attention in one process with the same dtype.

    Twice: a ring rounds p and ds to the dtype as flash attention does, which the math
    of the reference does not, and sums in another order.
    """
    exact = reference(inputs, gradient, causal, torch.float64)
    limits = map(bounds.bound, exact, reference(inputs, gradient, causal, dtype))
    limits = [limit * 2 / bounds.TIMES for limit in limits]
    for rank, got in enumerate(answers):
        names = [f"{x} on rank {rank}" for x in ("out", "dq", "dk", "dv")]
        found = zip(names, got, exact, limits, strict=True)
        bounds.check(
            [bounds.deviation(name, x, y, limit=limit) for name, x, y, limit in found]
        )


CASES = [
    pytest.param(2, 64, torch.float32, True, id="2-ranks-causal-float32"),
    pytest.param(4, 128, torch.bfloat16, True, id="4-ranks-causal-bfloat16"),
    pytest.param(4, 106, torch.float32, True, id="4-ranks-causal-uneven"),
    pytest.param(3, 79, torch.float32, True, id="3-ranks-causal-uneven"),
    pytest.param(3, 100, torch.float16, False, id="3-ranks-full-uneven-float16"),
]


@pytest.mark.parametrize(("ranks", "seq", "dtype", "causal"), CASES)
def test_whole_pipeline(interpreters, ranks, seq, dtype, causal):
    codes = [code_of_rank(rank, ranks, seq, dtype, causal) for rank in range(ranks)]
    for generated in codes:
        assert len(check_overlap(generated.forward)) == ranks - 1
        assert len(check_overlap(generated.backward)) == 2 * ranks - 1
        # A name has what was fused into the kernel too, as a conversion, or what deals
        # tokens out in another layout.
        assert re.search(r"triton_tem_fused\w*_attention_step_", generated.forward)
        assert re.search(
            r"triton_tem_fused\w*_attention_step_backw", generated.backward
        )
    inputs = [x.detach() for x in make_inputs("cpu", seq, dtype)]
    gradient = torch.randn(1, HEADS, seq, DIM).to(dtype)
    answers = interpreters[ranks].run(run_rank, codes, inputs, gradient, timeout=120)
    check_ranks(answers, inputs, gradient, causal, dtype)


LOCAL = rest(128, 128, False, DIM**-0.5, "0")


def local_ring(q, k, v):
    """What each of 8 ranks runs on its chunks of 16 tokens; no rank number is in it."""
    out, _ = torch.ops.cp.ring_attention(q, k, v, *LOCAL)
    return out


def local_inputs(device):
    return make_inputs(device, 16, torch.bfloat16, heads=2)


def without_comments(code):
    """Comments have the number of the graph and paths of temporary files."""
    return [line for line in code.splitlines() if not line.lstrip().startswith("#")]


def test_eight_ranks_have_the_same_code():
    """Without a causal mask nothing of the rank is left in the code."""

    def inductor(gm, inputs):
        return compile_local.compile_local(gm, inputs, None)

    compiler = functools.partial(torch.compile, backend=inductor, fullgraph=True)
    codes = []
    for rank in (0, 5):
        with fake_group(rank, 8):
            codes.append(generated_code(local_ring, local_inputs, compiler=compiler))
    for one, other in zip(*((x.forward, x.backward) for x in codes), strict=True):
        assert without_comments(one) == without_comments(other)
    assert len(check_overlap(codes[0].backward)) == 15


KINDS = {
    "causal": Visible(upper=(1, 1)),
    "slices": Visible((3, 40), (5, 30), (9, 8)),
}


def two_steps(q, k, v, grad, limits, kernel="triton"):
    """Two chunks in a row, forward and backward, by the operators."""
    told = StepChunk.plain(DIM**-0.5, limits).arguments()
    ops = torch.ops.cp
    out, lse, of_keys, of_rows = None, None, [], []
    for last in (False, True):
        out, lse = ops.attention_step(q, k, v, out, lse, *told, last, kernel)
    delta = (out * grad).sum(-1)
    operands = (grad, q, k, v, lse, delta)
    for last in (False, True):
        rest = (*told, last, kernel)
        of_keys = ops.attention_step_backward(*operands, of_keys, "dkdv", *rest)
        of_rows = ops.attention_step_backward(*operands, of_rows, "dq", *rest)
    return out, lse, *of_keys, *of_rows


def step_inputs(device, seq):
    """q and v lie in memory as [B, S, H, D]."""
    torch.manual_seed(0)
    q, v, grad = (
        torch.randn(1, seq, heads, DIM, device=device).transpose(1, 2)
        for heads in (4, 2, 4)
    )
    return q, torch.randn(1, 2, seq, DIM, device=device), v, grad


def run_steps(code, inputs):
    """The results of rank 0; the steps send nothing, so the others need not run."""
    return run(code, inputs)[0] if dist.get_rank() == 0 else None


@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_shapes_and_strides(interpreters, kind):
    """One code for several lengths; every result equals that of the math kernel."""
    limits = KINDS[kind]

    def steps(q, k, v, grad):
        return two_steps(q, k, v, grad, limits)

    lowering.register()
    with torch._dynamo.config.patch(specialize_int=True):  # sizes stay dynamic
        code = generated_code(
            steps,
            functools.partial(step_inputs, seq=64),
            compiler=functools.partial(torch.compile, dynamic=True, fullgraph=True),
        )
    assert any(isinstance(x, tuple) for x in code.arguments)
    for seq in (64, 50):
        inputs = step_inputs("cpu", seq)
        got = interpreters[2].run(run_steps, code, inputs, timeout=120)[0]
        check_steps(got, inputs, limits)


def check_steps(got, inputs, limits):
    """What the math kernel gives in float64, as nearly as it does in float32."""
    exact = two_steps(*(x.double() for x in inputs), limits, "aten_math")
    rough = two_steps(*inputs, limits, "aten_math")
    for name, *each in zip(
        ("out", "lse", "dk", "dv", "dq"), got, exact, rough, strict=True
    ):
        bounds.assert_close(name, *each, floor=bounds.OPERAND_SCALE)


def permuted_inputs(device, orders):
    torch.manual_seed(0)
    heads = (4, 2, 2, 4)  # of q, k, v and grad
    return tuple(
        in_memory_order(torch.randn(2, n, 48, DIM, device=device), order)
        for n, order in zip(heads, orders, strict=True)
    )


MIXED = [(0, 1, 3, 2), (3, 2, 0, 1), (0, 2, 3, 1), (1, 3, 2, 0)]
ORDERS = [
    pytest.param(MIXED, id="mixed"),
    *(
        pytest.param([order] * 4, id="".join(map(str, order)))
        for order in itertools.permutations(range(4))
    ),
]


@pytest.mark.parametrize("orders", ORDERS)
def test_memory_orders(interpreters, orders):
    """The templates read dense rows, so Inductor has to give them such."""
    lowering.register()
    inputs = permuted_inputs("cpu", orders)
    code = generated_code(
        lambda *given: two_steps(*given, KINDS["causal"]),
        functools.partial(permuted_inputs, orders=orders),
        compiler=functools.partial(torch.compile, fullgraph=True),
    )
    got = interpreters[2].run(run_steps, code, inputs, timeout=120)[0]
    check_steps(got, inputs, KINDS["causal"])


def test_max_autotune_tries_every_config(monkeypatch):
    """The candidates of the table reach Inductor's autotuner, once per step."""
    offered = []
    original = compat.choose

    def choose(name, choices, *rest):
        offered.append((name, len(choices)))
        return original(name, choices, *rest)

    monkeypatch.setattr(compat, "choose", choose)
    # It would lower a ring of its own, in the first compilation of a process.
    monkeypatch.setattr(compile_local, "ring_problem", lambda device: None)
    for autotune in (False, True):
        offered.clear()
        with inductor_config.patch(max_autotune=autotune):
            code_of_rank(1, 2, 64, torch.bfloat16, True)
        counts = {
            f"cp_{kernel.value}": len(configs(kernel, "sm90", torch.bfloat16, 32))
            for kernel in STEP_KERNELS
        }
        assert all(count > 1 for count in counts.values())
        assert len(offered) == 3 * 2  # three kernels, two steps on rank 1
        for name, count in offered:
            assert count == (counts[name] if autotune else 1)
