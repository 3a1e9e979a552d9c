"""Models that put image features at image tokens, against one process.

transformers counts image tokens by data, which would break the graph, unless
TRANSFORMERS_DISABLE_TORCH_CHECK is set; Dynamo captures what is read by a mask only
where `capture_dynamic_output_shape_ops` says so. Then the deep-stack is one graph; the
vision model of LLaVA may break its own, and features enter as a plain tensor.
"""

import os
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn as nn
from torch._dynamo.utils import counters

from cpcompile import logs
from tests.cpu.against_one_process import Comparison, warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import deviations, in_one_process, step

IMAGE_TOKEN, SEQ = 63, 17
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def tokens():
    ids = torch.randint(0, 60, (2, SEQ))
    ids[:, 5:9] = IMAGE_TOKEN
    return ids


def llava():
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(num_hidden_layers=1, **TEXT),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    ids = tokens()
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 8, 8),
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
        "use_cache": False,
    }
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.post_layernorm.requires_grad_(False)  # of no feature
    return model, inputs


class DeepStack(nn.Module):
    """The text model of Qwen3-VL, with features that stand for those of images."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

        rotary = {"rope_type": "default", "mrope_section": [2, 1, 1]}
        config = qwen.Qwen3VLTextConfig(
            num_hidden_layers=2, head_dim=8, rope_scaling=rotary, **TEXT
        )
        self.text = qwen.Qwen3VLTextModel(config)
        self.merge = nn.Linear(5, 32)

    def forward(self, input_ids, patches):
        features = self.merge(patches)
        x = self.text.embed_tokens(input_ids)
        mask = (input_ids == IMAGE_TOKEN)[..., None].expand_as(x)
        x = x.masked_scatter(mask, features)
        y = self.text(
            inputs_embeds=x,
            use_cache=False,
            visual_pos_masks=mask[..., 0],
            deepstack_visual_embeds=[features.sin()],
        )
        return (y.last_hidden_state.square().mean(),)


def deep_stack():
    return DeepStack(), {
        "input_ids": tokens(),
        "patches": torch.randn(8, 5),
    }


def train(call, model, inputs):
    dtype = next(model.parameters()).dtype
    own = {
        name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    return step(lambda **named: call(**named)[0], model, **own)


def run_model(make) -> tuple[Comparison, int, int]:
    define_schemas()
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    counters.clear()
    torch.manual_seed(0)
    model, inputs = make()
    wanted = in_one_process(lambda alone: train(alone, alone, inputs), model)
    options = {
        "inner": "aot_eager",
        "mesh": sequence_mesh(torch.distributed.get_world_size()),
    }
    no_check = mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
    captures = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with no_check, captures, warnings() as texts:
        compiled = torch.compile(model, backend="cp", options=options)
        values = train(compiled, model, inputs)
    compared = Comparison(deviations(values, *wanted), texts)
    writes = counters["cpcompile"]["number_rows"]
    return compared, writes, len(counters["graph_break"])


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("world", "make", "writes"),
    [(2, llava, 1), (2, deep_stack, 2), (3, deep_stack, 2)],
)
def test_features_are_placed_by_each_rank(pools, world, make, writes):
    pytest.importorskip("transformers")
    for comparison, numbered, breaks in pools[world].run(run_model, make, timeout=160):
        comparison.check()
        assert numbered == writes
        if make is deep_stack:
            assert (breaks, comparison.warnings) == (0, [])
