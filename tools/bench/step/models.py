"""The models of bench.py, which return their loss, and the tokens of a step.

Sharding tokens without a compiler needs positions and labels from outside; the Llama
takes both, and the GPT, as it is written, neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.models.torchvision_schemas import define_schemas
from tools.gpt import BYTES, GPT

WIDTH = 256
GPT_LAYERS, GPT_HEADS = 6, 4
LLAMA_LAYERS, LLAMA_HEADS, LLAMA_WORDS = 4, 8, 32_000
LLAMA_MLP = 688  # Llama's 2.7 times the width
IGNORED = -100

Inputs = dict[str, Tensor]


class Llama(nn.Module):
    """A Llama of transformers that predicts the next token."""

    def __init__(self, context: int) -> None:
        super().__init__()
        define_schemas()  # before models of transformers are imported
        import transformers  # heavy

        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=LLAMA_WORDS,
                hidden_size=WIDTH,
                intermediate_size=LLAMA_MLP,
                num_hidden_layers=LLAMA_LAYERS,
                num_attention_heads=LLAMA_HEADS,
                max_position_embeddings=context,
                use_cache=False,
            )
        )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        shifted: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of tokens [B, S]; `shifted`: labels of next tokens."""
        more: dict[str, Any] = {} if shifted is None else {"shift_labels": shifted}
        if mask is not None:
            more["attention_mask"] = mask
        loss: Tensor = self.model(
            input_ids=tokens, labels=labels, position_ids=positions, **more
        ).loss
        return loss


def new_gpt(context: int) -> nn.Module:
    """Make the GPT of tools/gpt.py."""
    return GPT(WIDTH, GPT_HEADS, GPT_LAYERS, context)


MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt": new_gpt, "llama": Llama}
ABOUT = {
    "gpt": f"GPT of {GPT_LAYERS} layers, width {WIDTH}, {GPT_HEADS} heads",
    "llama": f"Llama of {LLAMA_LAYERS} layers, width {WIDTH}, {LLAMA_HEADS} heads, "
    f"{LLAMA_WORDS:,} words",
}


def new_model(name: str, context: int) -> nn.Module:
    """Make a model with the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[name](context)


def new_inputs(name: str, tokens: int) -> Inputs:
    """Make the arguments of every step, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    words = BYTES if name == "gpt" else LLAMA_WORDS
    ids = torch.randint(words, (1, tokens), generator=generator)
    return {"tokens": ids} if name == "gpt" else {"tokens": ids, "labels": ids}


def with_places(inputs: Inputs) -> Inputs:
    """Add positions and labels of next tokens, if the model takes them.

    A mask that hides nothing keeps transformers from taking the positions of a shard
    for those of several documents.
    """
    if "labels" not in inputs:
        return inputs
    shifted = F.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    positions = torch.arange(shifted.shape[1])[None]
    mask = torch.ones_like(shifted)
    return {**inputs, "positions": positions, "shifted": shifted, "mask": mask}
