"""Hand on fake tensors: values with a shape and without data."""

# Seen in 2.11 to 2.15.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "is_fake",
]
