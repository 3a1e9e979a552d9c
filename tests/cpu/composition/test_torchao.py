"""torchao: float8 training, quantisation-aware training, quantised weights of LoRA."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import Values, check, deviations, in_one_process, step

WORDS, WIDTH, HEADS = 61, 64, 4


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def named(*names):
    return lambda module, name: name in names


def float8(model, recipe, **settings):
    """In the arithmetic of float32, which a CPU has."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    for name, value in {"emulate": True, **settings}.items():
        object.__setattr__(config, name, value)
    convert_to_float8_training(
        model, config=config, module_filter_fn=named("qkv", "out")
    )


def quantised(model, config, names, **settings):
    from torchao import quantization

    config = getattr(quantization, config)(**settings)
    quantization.quantize_(model, config, filter_fn=named(*names))
    for x in model.parameters():
        x.requires_grad_(type(x) is nn.Parameter)


def aware(model, **settings):
    """Layers whose forward rounds as quantised ones will: their inputs and weights."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.qat import QATConfig

    base = Int8DynamicActivationIntxWeightConfig(**settings)
    quantize_(model, QATConfig(base, step="prepare"), filter_fn=named("qkv"))


def nf4(model):
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for layer in (model.qkv, model.out):
        weight = to_nf4(layer.weight.detach(), 64, 16)
        layer.weight = nn.Parameter(weight, requires_grad=False)


BOTH = ("qkv", "out")
TRAINED = {
    "float8": lambda m: float8(m, "tensorwise"),
    "float8 rows": lambda m: float8(m, "rowwise"),
    "float8 weights": lambda m: float8(
        m, "tensorwise", enable_fsdp_float8_all_gather=True
    ),
}
# Inputs are rounded too. Attention adds up in another order, and where its result is
# rounded, that is one step now and then; so it is the layer in front that rounds.
ROUNDED = {
    "aware": lambda m: aware(m, weight_dtype=torch.int4),
    "int8 inputs": lambda m: quantised(
        m, "Int8DynamicActivationInt8WeightConfig", ["qkv"]
    ),
}
ADAPTED = {
    "int8": lambda m: quantised(m, "Int8WeightOnlyConfig", BOTH),
    "int4": lambda m: quantised(
        m, "IntxWeightOnlyConfig", BOTH, weight_dtype=torch.int4
    ),
    "float8 weights of LoRA": lambda m: quantised(m, "Float8WeightOnlyConfig", BOTH),
    "nf4": nf4,
}


def made(kind):
    """The model of a kind; one of quantised weights has adapters."""
    define_schemas()
    torch.manual_seed(0)
    model = Decoder()
    (TRAINED | ROUNDED | ADAPTED)[kind](model)
    if kind in TRAINED or kind == "aware":
        return model
    from peft import LoraConfig, get_peft_model  # slow to import

    names = ["qkv"] if kind in ROUNDED else list(BOTH)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    )


def in_float64(kind, *batch) -> Values:
    """A step with plain weights: what the quantised ones stand for."""
    plain = made(kind)  # a copy of NF4 weights is quantised anew
    for layer in plain.modules():
        weight = layer.weight if isinstance(layer, nn.Linear) else None
        if weight is not None and type(weight) is not nn.Parameter:
            numbers = F.linear(torch.eye(weight.shape[1]), weight).t().detach()
            layer.weight = nn.Parameter(numbers, requires_grad=False)
    return step(plain.double(), plain, *batch)


def of_samples(model, *batch) -> Values:
    """A step that adds up the samples, one after another."""
    singles = [
        step(model, model, *(x[i : i + 1] for x in batch)) for i in range(len(batch[0]))
    ]
    return {name: sum(x[name] for x in singles) / len(singles) for name in singles[0]}


KINDS = (*TRAINED, *ROUNDED, *ADAPTED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kinds", "inner"),
    [
        pytest.param(("float8", "aware", "int8", "nf4"), "aot_eager", id="some"),
        pytest.param(KINDS, "aot_eager", id="all"),
        pytest.param(("float8", "int8"), "inductor", id="code"),
    ],
)
@on_ranks(2, timeout=290)
def test_steps_equal_one_process(kinds, inner):
    for kind in kinds:
        model = made(kind)
        tokens = torch.randint(WORDS, (2, 65))
        batch = tokens[:, :-1], tokens[:, 1:]
        if kind in TRAINED:
            values = in_one_process(lambda m, b=batch: step(m, m, *b), model)
        elif kind in ROUNDED:
            values = step(model, model, *batch), of_samples(model, *batch)
        else:
            values = in_float64(kind, *batch), step(model, model, *batch)
        torch._dynamo.reset()
        call = compiled_on(2, model, fullgraph=True, inner=inner)
        with warnings() as texts:
            got = step(call, model, *batch)
        check(deviations(got, *values))
        gathered = [x for x in texts if "on gathered tensors" in x]
        assert not gathered, (kind, gathered)
