"""A fake GPU is gone after its use; test_generated_ring runs the code for it."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from tests.kernels.fake_cuda import fake_cuda


def test_nothing_is_left_of_the_fake_gpu():
    def seen():
        accelerator = torch.accelerator.current_accelerator()
        return accelerator, torch.cuda.device_count(), has_triton()

    before = seen()
    with fake_cuda(), FakeTensorMode():
        assert torch.cuda.get_device_capability() == (9, 0)
        assert has_triton()
        x = torch.randn(3, 4, device="cuda:0", requires_grad=True)
        (x[0] * x[:, 1:].sum()).sum().backward()
        assert x.grad.device == torch.device("cuda:0")
    assert seen() == before
