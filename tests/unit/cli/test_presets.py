"""The sizes of well-known models, compared with transformers where it knows them."""

import pytest
import transformers

from cpcompile.apps.cli.presets import PRESETS, find_preset
from tests.models.torchvision_schemas import define_schemas

define_schemas()  # before transformers imports torchvision


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_every_preset_is_a_possible_model(preset):
    assert preset.layers > 0
    assert preset.heads % preset.kv_heads == 0
    assert preset.head_dim % 16 == 0
    assert (preset.windowed_layers > 0) == (preset.window > 0)
    assert preset.delta_rules is None or preset.delta_rules.layers > 0


def config(name):
    """A model's default configuration, which is that of the model named."""
    return getattr(transformers, name)()


@pytest.mark.parametrize(
    ("preset", "defaults"),
    [
        ("llama2-7b", "LlamaConfig"),
        ("mistral-7b", "MistralConfig"),
        ("mixtral-8x7b", "MixtralConfig"),
        ("gpt-oss-120b", "GptOssConfig"),
        ("phi3-mini", "Phi3Config"),
        ("gpt2", "GPT2Config"),
        ("deepseek-v3", "DeepseekV3Config"),
    ],
)
def test_sizes_are_those_of_transformers(preset, defaults):
    ours, theirs = PRESETS[preset], config(defaults)
    heads = theirs.num_attention_heads
    assert ours.layers + ours.windowed_layers == theirs.num_hidden_layers
    assert ours.heads == heads
    assert ours.kv_heads == getattr(theirs, "num_key_value_heads", heads)
    if preset == "deepseek-v3":
        assert ours.head_dim == theirs.qk_nope_head_dim + theirs.qk_rope_head_dim
        assert ours.value_dim == theirs.v_head_dim
        assert ours.latent_dim == theirs.kv_lora_rank + theirs.qk_rope_head_dim
    else:
        dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
        assert ours.head_dim == dim


def test_windows_are_those_of_transformers():
    kinds = config("GptOssConfig").layer_types
    preset = PRESETS["gpt-oss-120b"]
    assert preset.layers == kinds.count("full_attention")
    assert preset.windowed_layers == kinds.count("sliding_attention")


@pytest.mark.parametrize(
    ("preset", "defaults"),
    [("qwen3-next-80b-a3b", "Qwen3NextConfig"), ("qwen3.5", "Qwen3_5TextConfig")],
)
def test_mixers_are_those_of_transformers(preset, defaults):
    ours, theirs = PRESETS[preset], config(defaults)
    assert ours.layers == theirs.layer_types.count("full_attention")
    assert ours.delta_rules.layers == theirs.layer_types.count("linear_attention")
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert ours.delta_rules.heads == theirs.linear_num_value_heads
    assert ours.delta_rules.head_dim == theirs.linear_value_head_dim
    assert theirs.linear_key_head_dim == theirs.linear_value_head_dim


def test_an_unknown_name_lists_all_and_the_nearest():
    assert find_preset("Llama3-8B") is PRESETS["llama3-8b"]
    with pytest.raises(ValueError) as caught:
        find_preset("qwen3-7b")
    assert str(caught.value) == (
        f"model 'qwen3-7b' is unknown: there are {', '.join(PRESETS)}; did you mean "
        "'qwen3-8b'? Others are described by --heads, --kv-heads and --head-dim"
    )
