"""A loop that trains, evaluates and generates by one compiled model.

Labels are few and uneven: a step divides by the labels of all its rows, of which some
are on one rank alone, and one micro-batch has none.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.attention_cases import sequence_mesh
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import Values, check, deviations

STEPS, PROMPT, NEW = 3, 12, 3


def new_model(dropout: float) -> nn.Module:
    define_schemas()  # before models of transformers are imported
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
    )
    model: nn.Module = LlamaForCausalLM(config).double()
    model.loss_function = loss_in_float64
    return model


def loss_in_float64(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor, **given: Any
) -> Tensor:
    """What transformers computes in float32."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / num_items_in_batch


def batches(tokens: int = 37) -> list[list[tuple[Tensor, Tensor]]]:
    """Ids and labels of every step, in micro-batches."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(STEPS):
        ids = torch.randint(64, (3, 2, tokens), generator=generator)
        labels = ids.clone()
        labels[0, 0, : tokens - 4] = -100  # on the last rank alone
        labels[0, 1] = -100
        labels[1, :, tokens // 3 :] = -100  # on the first one
        labels[2] = -100
        steps.append(list(zip(ids, labels, strict=True)))
    return steps


def trained(call: Any, model: Any) -> Values:
    """Losses, gradients of the last step, and parameters; and what is generated."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found: Values = {}
    for number, micro_batches in enumerate(batches()):
        model.train()
        optimizer.zero_grad()
        # As transformers counts: a label belongs to the token before it.
        count = sum((labels[:, 1:] != -100).sum() for _, labels in micro_batches)
        for part, (ids, labels) in enumerate(micro_batches):
            given = {"labels": labels, "num_items_in_batch": count, "use_cache": False}
            loss = call(input_ids=ids, **given).loss
            loss.backward()
            found[f"loss {number}.{part}"] = loss.detach()
        found |= {
            f"grad {number} of {name}": p.grad.clone()
            for name, p in model.named_parameters()
        }
        optimizer.step()
        model.eval()
        with torch.no_grad():
            ids = batches(29)[number][1][0]
            logits = call(input_ids=ids, use_cache=False).logits
            found[f"logits {number}"] = logits
            tokens = call.generate(
                ids[:1, :PROMPT], max_new_tokens=NEW, do_sample=False
            )
            found[f"tokens {number}"] = tokens.double()
    return found


def on_ranks(world: int, dropout: float) -> tuple[Values, str]:
    """The values of a loop, and a digest of the parameters."""
    torch._dynamo.reset()
    model: Any = new_model(dropout)
    options = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    model.compile(backend="cp", options=options)
    found = trained(model, model)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    return found, digest.hexdigest()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3])
def test_it_equals_one_process(pools, world):
    model = new_model(0.0)
    alone = trained(model, model)
    every = pools[world].run(on_ranks, world, 0.0, timeout=500)
    assert len({digest for _, digest in every}) == 1
    found = every[0][0]
    for number in range(STEPS):
        assert found[f"loss {number}.2"] == alone[f"loss {number}.2"] == 0
        name = f"tokens {number}"
        assert torch.equal(found.pop(name), alone.pop(name))
    check(deviations(found, alone))


@pytest.mark.timeout(600)
def test_with_dropout_parameters_stay_bitwise_equal(pools):
    every = pools[2].run(on_ranks, 2, 0.2, timeout=500)
    (values, first), (_, second) = every
    assert first == second
    assert all(x.isfinite().all() for x in values.values())
    plain = pools[2].run(on_ranks, 2, 0.0, timeout=500)[0][0]
    assert not torch.equal(values["loss 0.0"], plain["loss 0.0"])
