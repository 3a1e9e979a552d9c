"""Under max-autotune kernels compete, once, with the shapes of the ring."""

import logging

import pytest
import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from cpcompile.compile import autotune_kernel, compile_local
from cpcompile.compile.autotune_kernel import fastest_kernel
from cpcompile.compile.compile_local import kernel_of
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import EXTRAS
from cpcompile.passes.local.expand_ring import RINGS
from tests.support.attention_calls import rest

FORWARD, BACKWARD = RINGS
Q, K, V = (2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 16)
SHAPES = {
    "grad": (2, 4, 6, 16), "q": Q, "k": K, "v": V, "out": (2, 4, 6, 16),
    "lse": (2, 4, 6), "bias": (1, 1, 6, 10), "key_ranges": (1, 6, 2),
    "q_segment_ids": (2, 6), "kv_segment_ids": (2, 10), "seeds": (2, 4), "sinks": (4,),
    "grad_lse": (2, 4, 6),
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """What is measured on a GPU that is not there; aten's flash attention is faster."""
    arguments = []

    def fastest_kernel(*shapes_and_more):
        arguments.append(shapes_and_more[:-1])  # not the clock
        return StepKernel.FLASH

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compile_local, "step_kernel", lambda *_: StepKernel.TEMPLATE)
    monkeypatch.setattr(compile_local, "why_no_flash", lambda *_: None)
    monkeypatch.setattr(compile_local, "fastest_kernel", fastest_kernel)
    with inductor_config.patch(max_autotune=True):
        yield arguments


def ring(target, *tensors, **others):
    """A ring with tensors of these names; others: fields of its spec."""
    graph = fx.Graph()

    def node_of(name):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(SHAPES[name], device="meta")
        return node

    named = {x: node_of(x) for x in EXTRAS if x in tensors}
    given = rest(12, 10, True, 0.5, "0", **named, **others)
    operands = ["q", "k", "v"]
    if target is BACKWARD:
        operands = ["grad", *operands, "out", "lse"]
        given += (False, node_of("grad_lse") if "grad_lse" in tensors else None)
    return graph.call_function(target, (*map(node_of, operands), *given))


@pytest.mark.parametrize(
    ("target", "tensors", "backward"),
    [
        (FORWARD, (), False),
        (FORWARD, ("sinks",), False),
        (BACKWARD, (), True),
        (BACKWARD, ("grad_lse",), True),
    ],
)
def test_a_ring_is_measured_with_its_own_shapes(measured, target, tensors, backward):
    assert kernel_of(ring(target, *tensors)) == "aten_flash"
    float32, meta = torch.float32, torch.device("meta")
    assert measured == [(Q, K, V, float32, meta, backward)]


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("tensors", "others"),
    [
        (("bias",), {}),
        (("key_ranges",), {}),
        (("key_ranges", "q_segment_ids", "kv_segment_ids"), {}),
        ((), {"softcap": 30.0}),
        (("seeds",), {"dropout_p": 0.1}),
        ((), {"score_mod": "score + q_idx"}),
    ],
)
def test_a_ring_under_a_mask_keeps_the_templates(measured, target, tensors, others):
    """On a GPU aten's flash attention takes no mask: its place would be plain math."""
    assert kernel_of(ring(target, *tensors, **others)) is None
    assert measured == []


def test_without_max_autotune_nothing_is_measured(measured):
    with inductor_config.patch(max_autotune=False):
        assert kernel_of(ring(FORWARD)) is None
    assert measured == []


STEP_SHAPES = ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8))
FORMS = {
    False: {"triton": ["attention_step"], "aten_flash": ["attention_step"]},
    True: {
        "triton": ["attention_step_backward"] * 2,
        "aten_flash": ["attention_step_backward"],
    },
}


class Timer:
    """Takes so many milliseconds for a kernel; knows what ran while it measured."""

    def __init__(self, monkeypatch, **milliseconds):
        self.milliseconds = milliseconds
        self.ran = {}
        self.running = None
        for name in {n for form in FORMS.values() for ns in form.values() for n in ns}:
            monkeypatch.setattr(autotune_kernel, name, self.watched(name))

    def watched(self, name):
        op = getattr(autotune_kernel, name)

        def call(*args):
            kernel = args[-1]
            if self.running is not None:
                self.running.append((kernel, name))
            return op(*args[:-1], "aten_math")  # there is no GPU here

        return call

    def __call__(self, run):
        self.running = []
        run()
        (kernel,) = {kernel for kernel, _ in self.running}
        assert kernel not in self.ran, f"{kernel} is measured twice"
        self.ran[kernel] = [name for _, name in self.running]
        self.running = None
        return self.milliseconds[kernel]


def fastest(timer, backward, shapes=STEP_SHAPES):
    device = torch.device("cpu")
    return fastest_kernel(*shapes, torch.float32, device, backward, timer)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("triton", "flash"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_the_faster_one(monkeypatch, backward, triton, flash):
    timer = Timer(monkeypatch, triton=triton, aten_flash=flash)
    expected = StepKernel.FLASH if flash < triton else StepKernel.TEMPLATE
    assert fastest(timer, backward) is expected
    assert timer.ran == FORMS[backward]


def test_it_is_measured_once_per_shape_and_direction(monkeypatch):
    timer = Timer(monkeypatch, triton=1.0, aten_flash=2.0)
    fastest(timer, True)
    timer.milliseconds = {}  # measuring again would fail
    assert fastest(timer, True) is StepKernel.TEMPLATE
    other = (STEP_SHAPES[0], (2, 2, 7, 8), (2, 2, 7, 8))
    for arguments in ((False, STEP_SHAPES), (True, other)):
        timer.ran, timer.milliseconds = {}, {"triton": 3.0, "aten_flash": 2.0}
        assert fastest(timer, *arguments) is StepKernel.FLASH


def test_the_times_are_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cpcompile.compile.autotune_kernel")
    fastest(Timer(monkeypatch, triton=0.25, aten_flash=0.5), False)
    assert caplog.messages == [
        "forward of a step with q [2, 4, 6, 8] and k [2, 2, 5, 8]: "
        "triton 0.250 ms, aten_flash 0.500 ms"
    ]
