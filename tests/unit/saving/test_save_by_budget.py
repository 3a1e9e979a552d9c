"""What a forward saves under a budget, and of buffers before they are written."""

import copy
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from cpcompile.errors import OptionError
from cpcompile.passes.joint.save_before_writes import save_before_writes
from cpcompile.passes.joint.saving import save_by_budget as save_by_budget_module
from cpcompile.passes.joint.saving.kept_values import (
    break_down,
    kind,
    maker,
    saved_bytes,
)
from cpcompile.passes.joint.saving.save_by_budget import (
    Choice,
    SavingBudget,
    save_by_budget,
)
from cpcompile.torch_patches import saved_values

LAYERS, WIDTH, HIDDEN, TOKENS, HEADS = 3, 16, 48, 40, 2

saved_values.install()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = 0.0

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        y = F.gelu(self.up(x))
        return x + self.down(F.dropout(y, self.dropout))


class Stack(nn.Module):
    def __init__(self, vocabulary=0, dropout=0.0, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary or 7, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for layer in self.layers:
            layer.dropout = dropout
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x.square().mean()


def stack(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return Stack(**changes).to(dtype), torch.randint(0, 7, (1, TOKENS))


class Compiled:
    """A model whose forward saves by a budget; its graphs, and what was chosen."""

    def __init__(
        self, model, given, all_gather_text=lambda text: [text], offload=False
    ):
        self.budget = SavingBudget(given, "model", all_gather_text, offload)
        self.forward = self.backward = None

        def partition(joint, *args, **kwargs):
            with saved_values.chosen_by(lambda x: save_by_budget(x, self.budget)):
                parts = min_cut_rematerialization_partition(joint, *args, **kwargs)
            self.forward, self.backward = parts
            return parts

        backend = aot_autograd(
            fw_compiler=lambda gm, _: gm.forward,
            bw_compiler=lambda gm, _: gm.forward,
            partition_fn=partition,
        )
        torch._dynamo.reset()
        self.call = torch.compile(model, backend=backend)

    def step(self, *inputs):
        torch.manual_seed(1)
        loss = self.call(*inputs)
        loss.backward()
        return loss.detach()

    @property
    def saved(self):
        (found,) = self.budget.found
        return found

    def count(self, *targets):
        """Calls in (forward, backward)."""
        return tuple(
            sum(len(x.graph.find_nodes(op="call_function", target=t)) for t in targets)
            for x in (self.forward, self.backward)
        )


def gradients(model, inputs):
    torch.manual_seed(1)
    loss = model(*inputs)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def check_gradients(model, exact):
    """The same calls, computed twice."""
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, exact[name], rtol=1e-12, atol=1e-14)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def saved_by_forward(compiled):
    """Bytes that the forward graph returns for the backward, counted anew."""
    inputs = {x.name for x in compiled.forward.graph.find_nodes(op="placeholder")}
    found = {}
    for node in compiled.backward.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if node.name not in inputs and not node.name.startswith("tangents"):
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    for node in compiled.forward.graph.find_nodes(op="placeholder"):
        found.pop(node.meta["val"].untyped_storage()._cdata, None)
    return sum(found.values())


@pytest.mark.parametrize("vocabulary", [7, 4000])  # torch's fraction counts parameters
@pytest.mark.parametrize("fraction", [1.0, 0.9, 0.7, 0.5, 0.4])
def test_no_more_is_saved_than_allowed(fraction, vocabulary):
    model, tokens = stack(vocabulary=vocabulary)
    loss, exact = gradients(model, [tokens])
    compiled = Compiled(model, fraction)
    assert torch.equal(compiled.step(tokens), loss)
    check_gradients(model, exact)
    saved = compiled.saved
    assert saved.size <= fraction * saved.fastest
    assert saved.size == saved_by_forward(compiled)
    if fraction < 1:
        assert saved.size < saved.fastest
    assert compiled.count(ATTENTION) == (LAYERS, 0) and not saved.attention
    again = compiled.count(*PRODUCTS)[1] - without_a_budget().count(*PRODUCTS)[1]
    assert again == sum(name in ("aten.mm", "aten.addmm") for name, _ in saved.again)


def without_a_budget():
    model, tokens = stack()
    compiled = Compiled(model, 1.0)
    compiled.step(tokens)
    return compiled


def test_bytes_and_choices():
    model, tokens = stack()
    share = Compiled(model, 0.5)
    share.step(tokens)
    size = Compiled(model, int(share.saved.fastest * 0.5))
    size.step(tokens)
    assert size.saved == share.saved
    model, tokens = stack()
    alone = Compiled(model, 1.0)
    alone.step(tokens)
    other = "[0, 3, 32]"
    together = Compiled(model, 1.0, lambda text: [text, other])
    together.step(tokens)
    assert together.saved.size < alone.saved.size
    assert max(Choice(), Choice(0, 3, 2), Choice(1, 3, 32), Choice(0, 3, 32)).again == 1


def least():
    """The smallest budget, and the text of the error that names it."""
    model, tokens = stack(dropout=0.5)
    with pytest.raises(Exception, match="activation_memory") as caught:
        Compiled(model, 2).step(tokens)
    text = str(caught.value)
    return int(text.split("at least ")[1].split(" bytes")[0]), text


def test_a_budget_that_cannot_be_met_names_the_smallest():
    model, tokens = stack(dropout=0.5)
    size, text = least()
    assert "of results of collectives, and random numbers" in text
    compiled = Compiled(model, size)
    compiled.step(tokens)
    assert compiled.saved.size == size
    with pytest.raises(Exception, match="needs at least") as caught:
        Compiled(model, size - 1).step(tokens)
    cause = caught.value
    while cause is not None and not isinstance(cause, OptionError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    assert cause is not None


def test_attention_is_computed_again_only_if_nothing_else_is_left():
    model, tokens = stack(dropout=0.5)
    _, exact = gradients(model, [tokens])
    size, _ = least()
    counts = {}
    for budget in range(size, 3 * size, size // 5):
        compiled = Compiled(model, budget)
        compiled.step(tokens)
        check_gradients(model, exact)
        model.zero_grad()
        counts[budget] = compiled.count(ATTENTION)[1]
        assert compiled.saved.size <= budget
        assert bool(compiled.saved.attention) == bool(counts[budget])
    falling = list(counts.values())
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == LAYERS and falling[-1] == 0


@pytest.mark.parametrize("fraction", [0.6, 0.45])
def test_dropout_is_the_same_in_the_backward(fraction):
    model, tokens = stack(dropout=0.5)
    _, exact = gradients(model, [tokens])
    compiled = Compiled(model, fraction)
    compiled.step(tokens)
    assert compiled.count(torch.ops.aten.native_dropout.default)[1] == 0
    check_gradients(model, exact)


def test_regions_of_the_user_are_computed_again_as_before():
    model, tokens = stack(checkpointed=True)
    _, exact = gradients(model, [tokens])
    compiled = Compiled(model, 1.0)
    compiled.step(tokens)
    assert compiled.saved.size == compiled.saved.fastest > 0
    assert compiled.saved.again == ()
    check_gradients(model, exact)


@pytest.mark.parametrize("given", [None, 0.5])
def test_what_is_saved_moves_to_the_host(given, monkeypatch):
    """As on an accelerator: torch copies what is marked, here from CPU to CPU."""
    monkeypatch.setattr(save_by_budget_module, "_LEAST_OFFLOADED", 2000)
    model, tokens = stack()
    _, exact = gradients(model, [tokens])
    compiled = Compiled(model, given, offload=True)
    with functorch_config.patch(enable_activation_offloading=True):
        compiled.step(tokens)
    copies = compiled.count(torch.ops.prims.device_put.default)
    assert copies[0] == copies[1] > LAYERS
    check_gradients(model, exact)


def test_the_report_of_what_is_saved():
    compiled = without_a_budget()
    graph = compiled.forward.graph
    results = [x for x in graph.output_node().args[0] if x is not None]
    sizes = saved_bytes(graph, results[1:])
    of_attention = [x for x in sizes if kind(x) == "attention and its messages"]
    assert len(of_attention) == 2 * LAYERS
    assert all(maker(x).target is ATTENTION for x in of_attention)
    text = break_down(sizes)
    assert "MiB of attention and its messages" in text and "of other values" in text
    model, tokens = stack()
    compiled = Compiled(model, 0.4)
    compiled.step(tokens)
    text = str(replace(compiled.saved))
    assert "budget" in text and "addmm" in text and "cheap calls" in text


SIZE = 4


def mean(y, buffer):
    with torch.no_grad():
        buffer.mul_(0.9).add_(y.abs().mean(0), alpha=0.1)
    return (y / buffer).square()


def by_lerp(y, buffer):
    with torch.no_grad():
        buffer.lerp_(y.detach().abs().mean(0), 0.1)
    return (y / buffer).square()


def counted(y, buffer):
    buffer += 1
    return y.square() / buffer


def part(y, buffer):
    first = buffer.view(2, 2)[0]
    scale = first.exp().sum()
    buffer.add_(1)
    return y * scale


def largest(y, buffer):
    values, _ = buffer.max(0)
    buffer.add_(1)
    return y * values.square()


FORWARDS = {f.__name__: f for f in (mean, by_lerp, counted, part, largest)}


class Buffered(nn.Module):
    """What is computed of a linear layer and of a buffer that it writes."""

    buffer: torch.Tensor

    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(SIZE, SIZE), name
        self.register_buffer("buffer", torch.linspace(1, 2, SIZE))

    def forward(self, x):
        return FORWARDS[self.name](self.linear(x), self.buffer).sum()


def step(call, model, x):
    for _ in "12":
        call(x).backward()
    return [model.linear.weight.grad, model.linear.bias.grad, model.buffer]


def compiled_with_writes(model):
    """The model by aot_eager with the pass, and how many values it saved."""
    counts = []

    def partition(joint, *args, **kwargs):
        counts.append(save_before_writes(joint.graph, None))
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    return torch.compile(model, backend=backend), counts


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_are_those_of_eager(name):
    torch.manual_seed(0)
    model, x = Buffered(name), torch.randn(3, SIZE)
    other = copy.deepcopy(model)
    call, counts = compiled_with_writes(other)
    for got, wanted in zip(step(call, other, x), step(model, model, x), strict=True):
        torch.testing.assert_close(got, wanted)
    assert counts[0] > 0


def test_what_the_backward_does_not_need_is_not_saved():
    class Watched(Buffered):
        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.buffer.lerp_(y.mean(0), 0.1)
            return y.square().sum()

    model = Watched("")
    call, counts = compiled_with_writes(model)
    step(call, model, torch.randn(3, SIZE))
    assert counts == [0]
