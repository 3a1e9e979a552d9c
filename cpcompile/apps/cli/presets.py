"""The attention of well-known models, for `cpcompile plan --model NAME`.

Numbers are those of the config that was published with the weights (config.json on the
Hugging Face hub where there is one); the comment names what they were read from.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRules:
    """Layers of gated delta rules: the heads of each call, and their dims.

    transformers repeats keys for every value head before.
    """

    layers: int
    heads: int = 32
    head_dim: int = 128


@dataclass(frozen=True)
class Preset:
    """The attention calls of one model, which are all alike.

    layers: number of layers that attend to the whole sequence, each with one call.
    value_dim: head dim of v, if it is not head_dim.
    latent_dim: numbers per token that k and v are made of, if these are fewer.
    windowed_layers, window: number of further layers, which see only a sliding window
        of `window` tokens; they are not planned.
    delta_rules: its layers that are no softmax attention.
    hidden, feed_forward, vocabulary: widths of the model and of the gated MLP, and
        words, where `--fit` knows how memory is used. tied: whether the head is the
        embedding. normed: whether q and k have norms of their own.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    causal: bool = True
    value_dim: int | None = None
    latent_dim: int | None = None
    windowed_layers: int = 0
    window: int = 0
    delta_rules: DeltaRules | None = None
    tied: bool = False
    normed: bool = False


PRESETS: dict[str, Preset] = {
    # meta-llama/Llama-2-7b, -13b, -70b
    "llama2-7b": Preset(32, 32, 32, 128, 4096, 11008, 32000),
    "llama2-13b": Preset(40, 40, 40, 128, 5120, 13824, 32000),
    "llama2-70b": Preset(80, 64, 8, 128, 8192, 28672, 32000),
    # meta-llama/Meta-Llama-3-8B, -70B, Llama-3.1-405B (arXiv 2407.21783, table 3)
    "llama3-8b": Preset(32, 32, 8, 128, 4096, 14336, 128256),
    "llama3-70b": Preset(80, 64, 8, 128, 8192, 28672, 128256),
    "llama3-405b": Preset(126, 128, 8, 128, 16384, 53248, 128256),
    # meta-llama/Llama-3.2-1B, -3B
    "llama3.2-1b": Preset(16, 32, 8, 64, 2048, 8192, 128256, tied=True),
    "llama3.2-3b": Preset(28, 24, 8, 128, 3072, 8192, 128256, tied=True),
    # mistralai/Mistral-7B-v0.3 (v0.1 had a window of 4096), Mixtral-8x7B-v0.1
    "mistral-7b": Preset(32, 32, 8, 128, 4096, 14336, 32768),
    "mixtral-8x7b": Preset(32, 32, 8, 128),
    # Qwen/Qwen2.5-7B, -32B, -72B
    "qwen2.5-7b": Preset(28, 28, 4, 128, 3584, 18944, 152064),
    "qwen2.5-32b": Preset(64, 40, 8, 128, 5120, 27648, 152064),
    "qwen2.5-72b": Preset(80, 64, 8, 128, 8192, 29568, 152064),
    # Qwen/Qwen3-8B, -32B, -30B-A3B, -235B-A22B
    "qwen3-8b": Preset(36, 32, 8, 128, 4096, 12288, 151936, normed=True),
    "qwen3-32b": Preset(64, 64, 8, 128, 5120, 25600, 151936, normed=True),
    "qwen3-30b-a3b": Preset(48, 32, 4, 128),
    "qwen3-235b-a22b": Preset(94, 64, 4, 128),
    # Qwen/Qwen3-Next-80B-A3B, and the default sizes of qwen3_5 in transformers: three
    # of four layers are gated delta rules
    "qwen3-next-80b-a3b": Preset(12, 16, 2, 256, delta_rules=DeltaRules(36)),
    "qwen3.5": Preset(8, 16, 4, 256, delta_rules=DeltaRules(24)),
    # google/gemma-2-9b, -27b: every second layer has a window
    "gemma2-9b": Preset(21, 16, 8, 256, windowed_layers=21, window=4096),
    "gemma2-27b": Preset(23, 32, 16, 128, windowed_layers=23, window=4096),
    # google/gemma-3-12b-pt, -27b-pt: every sixth layer sees everything
    "gemma3-12b": Preset(8, 16, 8, 256, windowed_layers=40, window=1024),
    "gemma3-27b": Preset(10, 32, 16, 128, windowed_layers=52, window=1024),
    # openai/gpt-oss-20b, -120b: every second layer has a window
    "gpt-oss-20b": Preset(12, 64, 8, 64, windowed_layers=12, window=128),
    "gpt-oss-120b": Preset(18, 64, 8, 64, windowed_layers=18, window=128),
    # deepseek-ai/DeepSeek-V3: latent attention as it is trained, with keys and values
    # of every head; q and k have 128 dims and 64 rotary ones, and a token's latent 512
    # (arXiv 2412.19437, 4.2)
    "deepseek-v3": Preset(61, 128, 128, 192, value_dim=128, latent_dim=576),
    # microsoft/Phi-3-mini-128k-instruct, Phi-3-medium-128k-instruct, phi-4
    "phi3-mini": Preset(32, 32, 32, 96, 3072, 8192, 32064),
    "phi3-medium": Preset(40, 40, 10, 128, 5120, 17920, 32064),
    "phi4": Preset(40, 40, 10, 128, 5120, 17920, 100352),
    # openai-community/gpt2, gpt2-xl
    "gpt2": Preset(12, 12, 12, 64),
    "gpt2-xl": Preset(48, 25, 25, 64),
    # Diffusion transformers: text and image tokens attend to each other in one call
    # stabilityai/stable-diffusion-3-medium, 3.5-large (MMDiT, depth 24 and 38)
    "sd3-medium": Preset(24, 24, 24, 64, causal=False),
    "sd3.5-large": Preset(38, 38, 38, 64, causal=False),
    # black-forest-labs/FLUX.1-dev: 19 double and 38 single blocks
    "flux": Preset(57, 24, 24, 128, causal=False),
    # Wan-AI/Wan2.1-T2V-1.3B, -14B: self-attention of the video tokens
    "wan2.1-1.3b": Preset(30, 12, 12, 128, causal=False),
    "wan2.1-14b": Preset(40, 40, 40, 128, causal=False),
    # tencent/HunyuanVideo: 20 double and 40 single blocks
    "hunyuan-video": Preset(60, 24, 24, 128, causal=False),
    # THUDM/CogVideoX-5b
    "cogvideox-5b": Preset(42, 48, 48, 64, causal=False),
}


def find_preset(name: str) -> Preset:
    """Return the preset called `name`, in upper or lower case.

    Raises: ValueError for an unknown name, with the names there are and the nearest.
    """
    preset = PRESETS.get(name.lower())
    if preset is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)
        raise ValueError(
            f"model {name!r} is unknown: there are {', '.join(PRESETS)}; did you mean "
            f"{near[0]!r}? Others are described by --heads, --kv-heads and --head-dim"
        )
    return preset
