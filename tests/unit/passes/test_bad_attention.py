"""What a user sees of operands that do not fit, and results that are written to."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

from tests.golden.capture import fake_mesh

MESH_AXES = {"cp": 4}
sdpa = F.scaled_dot_product_attention


class Layer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v, mask):
        return self.call(q, k, v, mask)  # the line


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers = nn.ModuleList([Layer(call)])

    def forward(self, q, k, v, mask=None):
        return self.layers[0](q, k, v, mask)


def masked(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask)


def grouped(q, k, v, mask):
    return sdpa(q, k, v, enable_gqa=True)


def split(q, k, v, mask):
    return sdpa(q.view(2, 5, -1, 8), k, v)


def raised(error, call, mesh, *inputs):
    options = {"mesh": mesh, "shard": {"q": 2}}
    step = torch.compile(Model(call), backend="cp", dynamic=False, options=options)
    with pytest.raises(error) as caught:
        step(*inputs)
    return str(caught.value)


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


X = (2, 4, 16, 8)
HALF = torch.randn(X).half()

# Inputs, and what torch says of them while Dynamo traces.
REFUSED_BY_TORCH = {
    "head dims": (masked, tensors(X, (2, 4, 16, 6), X), "[8, 8] but got: [8, 6]"),
    "dtypes": (
        masked,
        [torch.randn(X), HALF, torch.randn(X)],
        "Expected query, key, and value to have the same dtype",
    ),
    "heads": (masked, tensors((2, 6, 16, 8), X, X), "[2, 4]; but expected shape"),
    "grouped heads": (
        grouped,
        tensors((2, 6, 16, 8), X, X),
        "Number of heads in key and value must divide",
    ),
    "batches": (masked, tensors(X, (3, 4, 16, 8), (3, 4, 16, 8)), "had [3, 4]"),
    "shape of a mask": (
        masked,
        [*tensors(X, X, X), torch.ones(5, 5, dtype=torch.bool)],
        "broadcastable to [2, 4, 16, 16]",
    ),
    "dtype of a mask": (
        masked,
        [*tensors(X, X, X), torch.ones(16, 16, dtype=torch.long)],
        "got attn_mask.dtype: long int",
    ),
    "a size that does not divide": (split, tensors(X, X, X), "is invalid for input"),
}


@pytest.mark.parametrize("case", REFUSED_BY_TORCH)
def test_torch_says_why_and_where(mesh, case):
    call, inputs, reason = REFUSED_BY_TORCH[case]
    text = raised(TorchRuntimeError, call, mesh, *inputs)
    assert reason in text
    assert "from user code:" in text
    assert "return self.call(q, k, v, mask)  # the line" in text


# Inputs that torch takes while it traces, and what we say of them.
REFUSED_BY_US = {
    "fewer values than keys": (
        masked,
        tensors(X, X, (2, 4, 12, 8)),
        "got q [2, 4, 16, 8], k [2, 4, 16, 8], v [2, 4, 12, 8]; needed as many values "
        "as keys",
    ),
    "heads of keys and of values": (
        grouped,
        tensors((2, 8, 16, 8), X, (2, 2, 16, 8)),
        "needed equal batches, and k and v alike: expand them",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_US)
def test_we_say_what_where_and_how_to_fix_it(mesh, case):
    call, inputs, reason = REFUSED_BY_US[case]
    text = raised(BackendCompilerFailed, call, mesh, *inputs)
    assert "RewriteError: attention at layers.0 (node scaled_dot_product_" in text
    assert reason in text


def test_operands_that_fit_are_taken(mesh):
    """The twin: the same model, and nothing is raised."""
    options = {"mesh": mesh, "shard": {"q": 2}, "inner": "aot_eager"}
    step = torch.compile(Model(masked), backend="cp", dynamic=False, options=options)
    assert step(*tensors(X, X, X)).shape == X


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        y = self.project(x)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return y, y.sum()


@pytest.fixture
def results():
    """On rank 1 of a group that exchanges nothing."""
    with fake_mesh(2) as mesh:
        options = {"mesh": mesh, "shard": {"x": 2}, "inner": "aot_eager"}
        compiled = torch.compile(Attention(), backend="cp", options=options)
        yield compiled(torch.randn(1, 2, 8, 4))


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_program_made_is_written_to(results, which):
    made = results[which]
    assert made.requires_grad and not made._is_view()
    made += 1
    made.fill_(3.0)  # what a group that exchanges nothing gathers is anything
    assert bool((made == 3.0).all())
    made.sum().backward()
