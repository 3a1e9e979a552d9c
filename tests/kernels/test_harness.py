"""CUDA code is written and computes the right thing, on a machine without a GPU."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from tests.kernels import fake_cuda as fake_cuda_module
from tests.kernels.fake_cuda import fake_cuda
from tests.kernels.generated_code import generated_code
from tests.kernels.generated_module import Generated, InterpreterPool, execute, run
from tests.support.bounds import assert_close

RANKS = 2
ROWS, WIDTH, COLUMNS = 24, 32, 40  # rows of one rank


@pytest.fixture
def pool(interpreters) -> InterpreterPool:
    """Two ranks that exchange for real."""
    return interpreters[RANKS]


def scores(x, weight):
    return torch.softmax(x @ weight, -1) * x[:, :1]


def centred(y, total):
    return F.silu(y - total / (RANKS * y.shape[0]))


def step(x, weight):
    """One rank's part: softmax, matmul, indexing, pointwise, a sum over all ranks."""
    y = scores(x, weight)
    total = torch.ops._c10d_functional.all_reduce(y.sum(0), "sum", "0")
    return centred(y, torch.ops._c10d_functional.wait_tensor(total))


def make_inputs(device, dtype=torch.float32):
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    return torch.randn(ROWS, WIDTH, **options), torch.randn(WIDTH, COLUMNS, **options)


def expected(xs, weight, gradients):
    """All ranks in one process: results, gradients of xs and of weight."""
    xs = [x.detach().requires_grad_() for x in xs]
    weight = weight.detach().requires_grad_()
    ys = [scores(x, weight) for x in xs]
    total = sum(y.sum(0) for y in ys)
    results = [centred(y, total) for y in ys]
    torch.autograd.backward(results, gradients)
    return torch.cat(results), torch.cat([x.grad for x in xs]), weight.grad


def run_rank(generated, xs, weight, gradients):
    rank = torch.distributed.get_rank()
    return run(generated, (xs[rank], weight), (gradients[rank],))


def check(pool, generated: Generated, rows, dtype):
    """The error against float64 is that of eager in the same precision."""
    torch.manual_seed(0)
    xs = [torch.randn(rows, WIDTH).to(dtype) for _ in range(RANKS)]
    weight = torch.randn(WIDTH, COLUMNS).to(dtype)
    gradients = [torch.randn(rows, COLUMNS).to(dtype) for _ in range(RANKS)]
    ranks = pool.run(run_rank, generated, xs, weight, gradients)
    results = [returned for (returned,), _ in ranks]
    d_xs, d_weights = zip(*(found for _, found in ranks), strict=True)
    actual = torch.cat(results), torch.cat(d_xs), sum(x.double() for x in d_weights)
    eager = expected(xs, weight, gradients)
    exact = expected(
        [x.double() for x in xs], weight.double(), [x.double() for x in gradients]
    )
    for got, low, reference in zip(actual, eager, exact, strict=True):
        assert got.shape == reference.shape
        error, allowed = (got - reference).abs().max(), (low - reference).abs().max()
        # Other orders of summation; a fused kernel rounds less often than eager.
        assert error <= 2 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_shapes(pool, dtype):
    make = functools.partial(make_inputs, dtype=dtype)
    generated = generated_code(step, make, rank=0, ranks=RANKS)
    for code in (generated.forward, generated.backward):
        assert "_c10d_functional.all_reduce_" in code
        assert "async_compile.triton(" in code
    check(pool, generated, ROWS, dtype)


def test_dynamic_shapes_serve_other_sizes(pool):
    compiler = functools.partial(torch.compile, dynamic=True)
    generated = generated_code(
        step, make_inputs, compiler=compiler, rank=0, ranks=RANKS
    )
    assert any(isinstance(x, tuple) for x in generated.arguments)
    for rows in (ROWS, 13):
        check(pool, generated, rows, torch.float32)


def make_matrices(device):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(64, 64, generator=generator) for _ in range(2)]
    return tuple(x.to(device, torch.bfloat16) for x in made)


def biggest(x, y):
    """What a row of a matrix product has most of, and where."""
    product = x @ y
    return product, product.float().max(1).values, product.float().argmax(1)


@pytest.mark.parametrize("architecture", ["sm80", "sm90", "sm100"])
def test_template_and_reduction_with_indices(pool, architecture):
    patches = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    generated = generated_code(
        biggest, make_matrices, architecture=architecture, patches=patches
    )
    assert generated.backward is None
    assert "triton_tem_" in generated.forward
    assert f"cc={architecture.removeprefix('sm')}," in generated.forward
    x, y = make_matrices("cpu")
    (product, largest, where), _ = pool.run(run, generated, (x, y))[0]
    assert product.dtype == torch.bfloat16
    assert_close("product", product, x.double() @ y.double(), x @ y)
    assert torch.equal(largest, product.float().max(1).values)
    assert torch.equal(where, product.float().argmax(1))


def gather(x):
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 3, "0")
    return torch.ops._c10d_functional.wait_tensor(gathered).tanh()


def make_rows(device):
    return (torch.arange(8.0).reshape(2, 4).to(device),)


def repeat(x, size, group):
    return x.repeat(size, 1)


def run_replaced(generated, inputs):
    replaced = {
        "_c10d_functional.all_gather_into_tensor.default": repeat,
        "_c10d_functional.wait_tensor.default": lambda x: x,
    }
    return run(generated, inputs, replaced=replaced)


def test_operators_can_be_replaced(pool):
    generated = generated_code(gather, make_rows, ranks=3)
    (x,) = make_rows("cpu")
    for (gathered,), _ in pool.run(run_replaced, generated, (x,)):
        exact, rough = (x.to(t).repeat(3, 1).tanh() for t in (torch.float64, x.dtype))
        assert_close("gathered", gathered, exact, rough)
    with pytest.raises(
        AssertionError, match=r"torch\.ops\.cp\.other\.default\( is not"
    ):
        execute(generated.forward, [x], {"cp.other.default": repeat})


def test_nothing_is_left_of_the_fake_gpu():
    def seen():
        accelerator = torch.accelerator.current_accelerator()
        return accelerator, torch.cuda.device_count(), has_triton()

    before = seen()
    with fake_cuda("sm80"), FakeTensorMode():
        assert torch.cuda.get_device_capability() == (8, 0)
        assert has_triton()
        x = torch.randn(3, 4, device="cuda:0", requires_grad=True)
        (x[0] * x[:, 1:].sum()).sum().backward()
        assert x.grad.device == torch.device("cuda:0")
    assert seen() == before


def test_missing_compiler_is_named():
    with (
        mock.patch.object(fake_cuda_module.shutil, "which", lambda _: None),
        pytest.raises(RuntimeError, match=r"there is no g\+\+; install it or set CXX"),
    ):
        fake_cuda_module._pretend_or_stop.__wrapped__()
