"""Under max-autotune the faster of two kernels is found by measuring both, once."""

import logging

import pytest
import torch

from cpcompile.compile import autotune_kernel
from cpcompile.compile.autotune_kernel import fastest_kernel
from cpcompile.kernels.choice import StepKernel

SHAPES = ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8))
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


def fastest(timer, backward, shapes=SHAPES):
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
    other = (SHAPES[0], (2, 2, 7, 8), (2, 2, 7, 8))
    for arguments in ((False, SHAPES), (True, other)):
        timer.ran, timer.milliseconds = {}, {"triton": 3.0, "aten_flash": 2.0}
        assert fastest(timer, *arguments) is StepKernel.FLASH


def test_the_times_are_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cpcompile.compile.autotune_kernel")
    fastest(Timer(monkeypatch, triton=0.25, aten_flash=0.5), False)
    assert caplog.messages == [
        "forward of a step with q [2, 4, 6, 8] and k [2, 2, 5, 8]: "
        "triton 0.250 ms, aten_flash 0.500 ms"
    ]
