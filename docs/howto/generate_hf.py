"""Generate tokens with a small Llama, its static cache spread over the ranks.

    torchrun --nproc-per-node 1 docs/howto/generate_hf.py
    torchrun --nproc-per-node 2 docs/howto/generate_hf.py

Tokens are those of one process.
"""

import argparse

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import cpcompile as cp


def new_model(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def new_cache(config, length, dtype):
    cache = StaticCache(config=config, max_cache_len=length)
    heads, dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(1, heads, dim, dtype, device="meta")
    return cache


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=21, help="tokens")
    parser.add_argument("--new", type=int, default=6, help="tokens")
    parser.add_argument("--cache", type=int, default=40, help="tokens")
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    model = new_model(dtype).to(device)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, 97, (1, args.prompt), generator=generator).to(device)

    cache = cp.shard_cache(new_cache(model.config, args.cache, dtype), mesh)
    options = {"mesh": mesh, "inner": args.inner}
    model.forward = torch.compile(model.forward, backend="cp", options=options)
    tokens = model.generate(
        prompt, past_key_values=cache, max_new_tokens=args.new, do_sample=False
    )
    if dist.get_rank() == 0:
        part = list(cache.layers[0].keys.to_local().shape)
        print(f"tokens {tokens[0, args.prompt :].tolist()}")
        print(f"graphs {counters['stats']['unique_graphs']}, keys on a rank {part}")


if __name__ == "__main__":
    main()
