"""Under which key a program is kept: a text of ours, and torch's own details."""

import pytest
import torch
import torch.fx as fx
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cpcompile.compile import torch_cache


def key_of(x, text="calls", *more, **settings):
    config = AOTConfig(None, None, None, {}, 0, 0, False, **settings)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [mode.from_tensor(x, static_shapes=True)]
    with tracing(TracingContext(mode)), torch_cache._key_of(text):
        key, _ = autograd_cache.autograd_cache_key(
            fx.GraphModule({}, fx.Graph()), inputs, config, None, *more
        )
    return key


def test_the_same_inputs_have_the_same_key():
    assert key_of(torch.ones(4, 6)) == key_of(torch.zeros(4, 6))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 6, dtype=torch.bfloat16),
        torch.ones(6, 4).T,
        torch.ones(4, 7),
        torch.ones(4, 6, requires_grad=True),
    ],
    ids=["dtype", "memory order", "shape", "gradient"],
)
def test_other_inputs_have_another_key(other):
    assert key_of(torch.ones(4, 6)) != key_of(other)


def test_another_text_and_other_settings_have_another_key():
    x = torch.ones(4, 6)
    assert key_of(x) != key_of(x, "other calls")
    assert key_of(x) != key_of(x, is_export=True)
    with torch._inductor.config.patch(max_autotune=True):
        tuned = key_of(x)
    assert key_of(x) != tuned


def test_what_a_later_torch_hands_over_is_part_of_the_key(monkeypatch):
    """From 2.15 on the paths of activations are the fifth argument."""
    details = autograd_cache.AOTAutogradCacheDetails
    original = details.__init__

    def later(self, gm, inputs, config, settings, paths=()):
        original(self, gm, inputs, config, settings)
        self.paths = paths

    monkeypatch.setattr(details, "__init__", later)
    x = torch.ones(4, 6)
    assert key_of(x, "calls", ()) == key_of(x, "calls")
    assert key_of(x, "calls", (1,)) != key_of(x, "calls")
