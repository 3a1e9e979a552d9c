"""LoRA of peft: adapters are trained beside parameters that have no gradient."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.composition.training import loss_of
from tests.cpu.on_ranks import on_ranks
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import check, deviations

TOKENS = 33


@pytest.mark.parametrize("compiled", ["whole", "base"])
@on_ranks(2)
def test_lora(compiled: str) -> None:
    """What differs from one process, and the number of gradients."""
    define_schemas()
    from peft import LoraConfig, get_peft_model  # slow to import
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    base = LlamaForCausalLM(config)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(base, lora).double()
    for name, x in model.named_parameters():
        if "lora_B" in name:  # which begin as 0, and would hide the gradients of A
            torch.nn.init.normal_(x)
    ids = torch.randint(64, (2, TOKENS))

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=ids).logits
        loss = loss_of(logits[:, :-1], ids[:, 1:])
        loss.backward()
        named = ((n, x.grad) for n, x in model.named_parameters())
        found = {f"grad of {n}": x.clone() for n, x in named if x is not None}
        return found | {"loss": loss.detach()}

    exact = step()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    {"whole": model, "base": base}[compiled].compile(backend="cp", options=options)
    found = deviations(step(), exact)
    count = len(exact)
    assert count == 1 + 2 * 2 * 2  # the loss, and A and B of two layers' q and v
    check(found)
