"""Train and sample with pipelines of diffusers, on the ranks of one mesh axis.

    torchrun --nproc-per-node 1 docs/howto/diffusion.py wan
    torchrun --nproc-per-node 2 docs/howto/diffusion.py wan
    torchrun --nproc-per-node 2 docs/howto/diffusion.py ltx2

The transformers are tiny and random. What is printed is that of one process.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch.distributed.device_mesh import init_device_mesh

TEXT, POOLED = 32, 24  # channels of a prompt, and of its summary
HEADS = {"num_attention_heads": 4, "attention_head_dim": 24}


@dataclass
class Task:
    """What a pipeline samples, and what its transformer is trained on.

    sample: arguments of the pipeline. train: arguments of the transformer, for a batch.
    targets: what its results should be.
    """

    pipe: DiffusionPipeline
    sample: dict[str, Any]
    train: dict[str, Any]
    targets: list[torch.Tensor]


def new_prompts(lengths, channels=TEXT):
    """Return embeddings [B, T, C] padded with zeros, and their mask [B, T]."""
    mask = torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return torch.randn(*mask.shape, channels) * mask[..., None], mask


def noised(clean, timestep):
    """Return noisy tokens or latents, and the velocity that leads to the noise."""
    noise, share = torch.randn_like(clean), timestep / 1000
    share = share.view(*share.shape, *[1] * (clean.ndim - share.ndim))
    return torch.lerp(clean, noise, share.to(clean.dtype)), noise - clean


def wan(frames=9, height=48, width=80):
    """Wan: a call with the prompt, and one with the negative prompt."""
    transformer = WanTransformer3DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler,
        transformer=transformer,
    )
    prompts, _ = new_prompts([77, 5])
    sample = {
        "prompt_embeds": prompts[:1],
        "negative_prompt_embeds": new_prompts([77])[0],
        "num_frames": frames,
        "height": height,
        "width": width,
    }
    timestep = torch.randint(1, 1000, (2,))
    clean = torch.randn(2, 4, (frames - 1) // 4 + 1, height // 8, width // 8)
    latents, velocity = noised(clean, timestep)
    train = {"timestep": timestep, "encoder_hidden_states": prompts}
    return Task(pipe, sample, {"hidden_states": latents, **train}, [velocity])


def wan_ti2v(frames=9, height=48, width=80):
    """Wan 2.2 TI2V: every token has its own time; the first frame is given."""
    task = wan(frames, height, width)
    task.pipe.register_to_config(expand_timesteps=True)
    clean = torch.randn_like(task.targets[0])
    batch, _, frames, height, width = clean.shape
    timestep = torch.randint(1, 1000, (batch, 1)).repeat(1, frames)
    timestep[:, 0] = 0
    noise, share = torch.randn_like(clean), timestep[:, None, :, None, None] / 1000
    task.train["hidden_states"] = torch.lerp(clean, noise, share.to(clean.dtype))
    tokens_of_frame = height // 2 * (width // 2)
    task.train["timestep"] = timestep.repeat_interleave(tokens_of_frame, 1)
    task.targets = [noise - clean]
    return task


def hunyuan(frames=9, height=48, width=80):
    """HunyuanVideo: prompts of different lengths, with their mask."""
    transformer = HunyuanVideoTransformer3DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT,
        pooled_projection_dim=POOLED,
        rope_axes_dim=(8, 8, 8),
    )
    pipe = HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=None,
        tokenizer_2=None,
    )
    prompts, mask = new_prompts([77, 5])
    sample = {
        "prompt_embeds": prompts[:1],
        "pooled_prompt_embeds": torch.randn(1, POOLED),
        "prompt_attention_mask": mask[:1],
        "negative_prompt_embeds": prompts[1:],
        "negative_pooled_prompt_embeds": torch.randn(1, POOLED),
        "negative_prompt_attention_mask": mask[1:],
        "true_cfg_scale": 6.0,
        "num_frames": frames,
        "height": height,
        "width": width,
    }
    timestep = torch.randint(1, 1000, (2,))
    clean = torch.randn(2, 4, (frames - 1) // 4 + 1, height // 8, width // 8)
    latents, velocity = noised(clean, timestep)
    train = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": prompts,
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(2, POOLED),
        "guidance": torch.full((2,), 6000.0),
    }
    return Task(pipe, sample, train, [velocity])


def ltx2(frames=5, height=96, width=160):
    """LTX-2: a stream of video and one of audio, guidance in a batch of two."""
    audio_heads = {"audio_num_attention_heads": 4, "audio_attention_head_dim": 12}
    transformer = LTX2VideoTransformer3DModel(
        **HEADS,
        **audio_heads,
        in_channels=4,
        out_channels=4,
        audio_in_channels=32,
        audio_out_channels=32,
        cross_attention_dim=96,
        audio_cross_attention_dim=48,
        num_layers=2,
        caption_channels=TEXT,
        rope_type="split",
    )
    half = {"attention_head_dim": TEXT // 4, "num_attention_heads": 4, "num_layers": 1}
    connectors = LTX2TextConnectors(
        caption_channels=TEXT,
        text_proj_in_factor=1,
        **{f"video_connector_{name}": size for name, size in half.items()},
        **{f"audio_connector_{name}": size for name, size in half.items()},
        video_connector_num_learnable_registers=None,
        audio_connector_num_learnable_registers=None,
        rope_type="split",
    )
    one_block = {
        "block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "layers_per_block": (1,),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True,),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "downsample_type": ("spatial",),
        "upsample_residual": (False,),
        "upsample_factor": (1,),
    }
    pipe = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLLTX2Video(latent_channels=4, patch_size=16, **one_block),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=32, ch_mult=(1,), num_res_blocks=1, latent_channels=2
        ),
        text_encoder=None,
        tokenizer=None,
        connectors=connectors,
        transformer=transformer,
        vocoder=None,
    )
    prompts, mask = new_prompts([77, 5])
    sample = {
        "prompt_embeds": prompts[:1],
        "prompt_attention_mask": mask[:1],
        "negative_prompt_embeds": prompts[1:],
        "negative_prompt_attention_mask": mask[1:],
        "num_frames": frames,
        "height": height,
        "width": width,
    }
    grid = (frames - 1) // 2 + 1, height // 32, width // 32
    audio_frames = round(frames / 24 * 25)
    clean = torch.randn(2, grid[0] * grid[1] * grid[2], 4)
    timestep = torch.randint(1, 1000, (2, 1)).repeat(1, clean.shape[1])
    timestep[:, : grid[1] * grid[2]] = 0  # the first frame is given
    audio_timestep = timestep[:, -1:].repeat(1, audio_frames)
    video, velocity = noised(clean, timestep)
    audio, audio_velocity = noised(torch.randn(2, audio_frames, 32), audio_timestep)
    train = {
        "hidden_states": video,
        "audio_hidden_states": audio,
        "encoder_hidden_states": prompts,
        "audio_encoder_hidden_states": prompts,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "timestep": timestep,
        "audio_timestep": audio_timestep,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "audio_num_frames": audio_frames,
    }
    return Task(pipe, sample, train, [velocity, audio_velocity])


def flux(height=80, width=112):
    """Flux: image and prompt are joined, first in some blocks, then in all."""
    transformer = FluxTransformer2DModel(
        **HEADS,
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED,
        guidance_embeds=True,
        axes_dims_rope=(8, 8, 8),
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    prompts, _ = new_prompts([77, 5])
    pooled = torch.randn(2, POOLED)
    sample = {
        "prompt_embeds": prompts[:1],
        "pooled_prompt_embeds": pooled[:1],
        "negative_prompt_embeds": prompts[1:],
        "negative_pooled_prompt_embeds": pooled[1:],
        "true_cfg_scale": 4.0,
        "height": height,
        "width": width,
    }
    rows, columns = height // 16, width // 16
    timestep = torch.randint(1, 1000, (2,))
    tokens, velocity = noised(torch.randn(2, rows * columns, 16), timestep)
    places = torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, rows, columns)))
    train = {
        "hidden_states": tokens,
        "timestep": timestep / 1000,
        "encoder_hidden_states": prompts,
        "pooled_projections": pooled,
        "guidance": torch.full((2,), 3.5),
        "img_ids": places,
        "txt_ids": torch.zeros(prompts.shape[1], 3),
    }
    return Task(pipe, sample, train, [velocity])


def sd3(height=96, width=112):
    """Stable Diffusion 3: guidance in a batch of two."""
    transformer = SD3Transformer2DModel(
        **HEADS,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=TEXT,
        caption_projection_dim=96,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    prompts, _ = new_prompts([77, 5])
    pooled = torch.randn(2, POOLED)
    sample = {
        "prompt_embeds": prompts[:1],
        "pooled_prompt_embeds": pooled[:1],
        "negative_prompt_embeds": prompts[1:],
        "negative_pooled_prompt_embeds": pooled[1:],
        "height": height,
        "width": width,
    }
    timestep = torch.randint(1, 1000, (2,))
    latents, velocity = noised(torch.randn(2, 4, height // 8, width // 8), timestep)
    train = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": prompts,
        "pooled_projections": pooled,
    }
    return Task(pipe, sample, train, [velocity])


FAMILIES = {
    "wan": wan,
    "wan_ti2v": wan_ti2v,
    "hunyuan": hunyuan,
    "ltx2": ltx2,
    "flux": flux,
    "sd3": sd3,
}


def new_task(family, device, dtype):
    """Return a task with the same weights, noise and times on every rank."""
    torch.manual_seed(0)
    task = FAMILIES[family]()
    task.pipe.set_progress_bar_config(disable=True)
    task.pipe.to(device, dtype)

    def moved(x):
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(dtype) if is_float else x

    task.sample, task.train = (
        {name: moved(x) for name, x in given.items()}
        for given in (task.sample, task.train)
    )
    task.targets = [moved(x) for x in task.targets]
    return task


def train_step(transformer, task):
    """Return the loss and the norm of the gradients."""
    transformer.train()
    results = transformer(**task.train, return_dict=False)
    pairs = zip(results, task.targets, strict=True)
    loss = sum(F.mse_loss(result, target) for result, target in pairs)
    loss.backward()
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return loss.item(), norm.item()


def sample(task, steps):
    """Return the norms of what the pipeline makes: latents, and latents of audio."""
    made = task.pipe(
        **task.sample,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(1),  # the same noise on every rank
        output_type="latent",
        return_dict=False,
    )
    return [x.norm().item() for x in made]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--steps", type=int, default=3, help="of sampling")
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        torch.set_default_device(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    task = new_task(args.family, device, dtype)
    transformer = task.pipe.transformer
    transformer.compile(backend="cp", options={"mesh": mesh, "inner": args.inner})
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
    loss, norm = train_step(transformer, task)
    optimizer.step()
    norms = sample(task, args.steps)
    if dist.get_rank() == 0:
        print(f"loss {loss:.8f}, norm of gradients {norm:.8f}")
        print("norms of samples", *(f"{x:.6f}" for x in norms))


if __name__ == "__main__":
    main()
