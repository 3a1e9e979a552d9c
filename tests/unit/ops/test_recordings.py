"""The backward of a mixer uses what its forward has recorded, where that is right."""

import gc

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cpcompile as cp
from cpcompile.ops.mixers import recordings
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.passes.joint.record_mixers import record_mixers
from cpcompile.torch_private.fake_tensors import FakeTensor
from tests.golden.golden_text import assert_golden

runs = []


def running(x, gate):
    """A product that autograd keeps the result of, over tokens."""
    if not isinstance(x, FakeTensor):
        runs.append(1)
    return torch.cumsum(torch.exp(x) * gate, 1).tanh()


@pytest.fixture
def operands():
    runs.clear()
    torch.manual_seed(0)
    cp.register_mixer(running, tokens={"x": 1, "gate": 1, "return": 1}, independent={})
    shape = (2, 5, 3)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(2)]


def text_of(operands):
    call, _ = MixerCall.of(running, operands, {})
    runs.clear()
    return str(call)


def recorded(operands):
    """The result, what the backward is given of the forward, and wanted gradients."""
    wanted = torch.autograd.grad(running(*operands).sum(), operands)
    text = text_of(operands)
    plain = [x.detach().clone() for x in operands]
    y, *copies, token = torch.ops.cp.mixer_recorded(plain, [0, 1], text)
    for x in (*plain, y):
        x.zero_()  # as a compiler may do that needs them no more
    return torch.ones_like(y), copies, text, token, wanted


def backward(grad, copies, text, token):
    return torch.ops.cp.mixer_backward([grad], copies, [0], [0, 1], text, token)


def test_a_recording_is_used_once(operands):
    grad, copies, text, token, wanted = recorded(operands)
    for count in (1, 2):  # the second time the function runs again
        assert torch.equal(torch.stack(backward(grad, copies, text, token)),
                           torch.stack(wanted))  # fmt: skip
        assert len(runs) == count


def test_work_is_counted_once_where_it_is_done_once():
    """A forward, and two gradients of its product; without a token a forward more."""

    def product(x):
        return torch.cumsum(x @ x.new_ones(8, 8), 1)

    cp.register_mixer(product, tokens={"x": 1, "return": 1}, independent={})
    x = torch.ones(1, 128, 8)
    call, _ = MixerCall.of(product, (x,), {})
    forward = 2 * 128 * 8 * 8
    with FlopCounterMode(display=False) as flops:
        y, *copies, token = torch.ops.cp.mixer_recorded([x], [0], str(call))
    assert flops.get_total_flops() == forward
    for given, runs_of_forward in ((token, 2), (None, 3)):
        with FlopCounterMode(display=False) as flops:
            torch.ops.cp.mixer_backward([y], copies, [0], [0], str(call), given)
        assert flops.get_total_flops() == runs_of_forward * forward


def test_what_has_no_recording(operands):
    # As if they had been computed again, or moved and brought back.
    grad, copies, text, token, _ = recorded(operands)
    copies = [x * 2 for x in copies]
    leaves = [x.clone().requires_grad_() for x in copies]
    wanted = torch.autograd.grad(running(*leaves).sum(), leaves)
    runs.clear()
    found = backward(grad, copies, text, token)
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert len(runs) == 1
    grad, copies, text, token, wanted = recorded(operands)
    copy = token.clone()
    del token
    found = backward(grad, copies, text, copy)
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert len(runs) == 2


def test_a_recording_ends_with_its_token(operands):
    gc.collect()
    before = len(recordings._memories)
    *_, token, _ = recorded(operands)
    assert len(recordings._memories) == before + 1
    view = token.view(1)
    del token
    assert len(recordings._memories) == before + 1
    del view
    assert len(recordings._memories) == before


def compiled(function):
    """A function through AOTAutograd with the pass, and the lines of its graphs."""
    lines, counts = [], []

    def partition(joint, *args, **kwargs):
        counts.append(record_mixers(joint.graph, None))
        joint.recompile()
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def read(module, inputs):
        lines.extend(
            str(x) + " = " + x._pretty_print_target(x.target).rpartition("cp.")[2]
            for x in module.graph.nodes
            if "mixer" in str(x.target)
        )
        return boxed_nop(module, inputs)

    backend = aot_autograd(fw_compiler=read, bw_compiler=read, partition_fn=partition)
    return torch.compile(function, backend=backend, fullgraph=True), lines, counts


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_step_runs_the_function_once(operands, checkpointed):
    """Or once more for a checkpoint."""
    text = text_of(operands)

    def block(x, gate):
        return torch.ops.cp.mixer([x.sin(), gate], text)[0].cos()

    def model(x, gate):
        if checkpointed:
            return checkpoint(block, x, gate, use_reentrant=False)
        return block(x, gate)

    call, lines, counts = compiled(model)
    x, gate = operands
    wanted = torch.autograd.grad(running(x.sin(), gate).cos().sum(), operands)
    before = len(recordings._memories)
    for _ in range(2):
        runs.clear()
        y = call(x, gate).sum()
        found = torch.autograd.grad(y, operands)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
        assert len(runs) == (2 if checkpointed else 1)
    assert counts == [1]
    del y
    assert len(recordings._memories) == before
    if not checkpointed:
        assert_golden(
            "\n".join(lines),
            """\
mixer = mixer_recorded.default
mixer_backward = mixer_backward.default""",
        )
