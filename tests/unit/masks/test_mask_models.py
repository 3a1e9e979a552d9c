"""Masks of models of transformers, as Dynamo sees them."""

import pytest
import torch

from tests.models.torchvision_schemas import define_schemas
from tests.unit.masks.mask_cases import check, read

define_schemas()  # before transformers imports torchvision
transformers = pytest.importorskip("transformers")

S = 37
PADDED, PACKED = "attention_mask", "position_ids"


def decoder(name: str, **more):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**sizes | more)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)


def data(kind: str, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (2, S), generator=g)
    first = int(torch.randint(1, S, (1,), generator=g))
    if kind == PADDED:
        mask = torch.randint(0, 4, (2, S), generator=g) > 0
        mask[0, :first] = False
        return {"input_ids": ids, kind: mask.long()}
    if kind == PACKED:
        row = torch.cat([torch.arange(first), torch.arange(S - first)])
        return {"input_ids": ids, kind: torch.stack([row, torch.arange(S)])}
    return {"input_ids": ids}


LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "Llama": (lambda: decoder("Llama"), "is_causal", "is_causal"),
    "Mistral": (
        lambda: decoder("Mistral", sliding_window=8),
        "causal, window 8",
        "causal, window 8",
    ),
    "Gemma3": (
        lambda: decoder("Gemma3Text", sliding_window=8, layer_types=LAYERS),
        "causal, window 8",
        "is_causal",
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["", PADDED, PACKED])
def test_decoders(name, kind):
    model, *texts = MODELS[name]
    added = {"": "", PADDED: ", key padding", PACKED: ", same document"}[kind]
    wanted = [t.replace("is_causal", "causal") + added if added else t for t in texts]
    logits = forward(model().eval())
    found = read(logits, **data(kind, 0))
    assert found.texts == wanted
    for seed in range(3):
        check(found, **data(kind, seed))


def forward(model):
    def logits(**inputs):
        return model(**inputs).logits

    return logits
