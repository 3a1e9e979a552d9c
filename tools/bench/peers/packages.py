"""Context parallel attention of other packages, where it runs on CPU.

None of them is needed. They are imported from an environment into which they were
installed next to torch, without what they would bring along:

    tools/in_venv pip install --no-deps deepspeed ring-attention-pytorch yunchang
    tools/in_venv pip install einops beartype jaxtyping hjson msgpack py-cpuinfo \
        pydantic ninja

A package that is missing, or that fails, is left out with the reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.peers import documents
from tools.bench.peers.attentions import LeftOut, Offer, Peer, by_autograd, world
from tools.bench.peers.documents import Mask

PACKAGES = ("deepspeed", "ring-attention-pytorch", "yunchang")


def package_offers() -> Iterator[Offer]:
    """Yield what other packages have, in the order in which one repetition runs it."""
    yield Offer("deepspeed_ulysses", deepspeed_ulysses)
    yield Offer("ring_attention_pytorch", ring_attention_pytorch)
    yield Offer("ring_attention_pytorch_zigzag", gathered_zigzag)
    yield Offer("yunchang_ulysses", lambda mask: yunchang("yunchang_ulysses", mask))
    yield Offer("yunchang_ring", lambda mask: yunchang("yunchang_ring", mask))


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def imported(name: str) -> Any:
    """Import a module; raise LeftOut if it, or what it needs, is missing."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed looks for others
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LeftOut(f"not imported: {error}") from error


def deepspeed_ulysses(mask: Mask) -> Peer:
    """Make a peer of DistributedAttention, with torch's attention in between.

    It exchanges tokens for heads.
    """
    layer = imported("deepspeed.sequence.layer")
    start_deepspeed()
    attend = documents.attend(mask)

    def on_heads(*qkv: Tensor) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

    module = layer.DistributedAttention(on_heads, world(), scatter_idx=2, gather_idx=1)

    def exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, 0)  # the batch is dim 0
        return out

    return by_autograd("deepspeed_ulysses", "contiguous", exchanged, tokens_first=True)


@functools.cache
def start_deepspeed() -> None:
    """Let deepspeed use the group that there is."""
    imported("deepspeed.comm").init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False
    )


def ring_attention_pytorch(mask: Mask) -> Peer:
    """Make a peer of its ring for all devices, in tiles of plain PyTorch.

    The ring for CUDA is Triton's.
    """
    package = imported("ring_attention_pytorch")
    if mask is not Mask.CAUSAL:
        raise LeftOut("its ring ignores masks if it is causal")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = package.ring_flash_attn(
            q, k, v, causal=True, ring_reduce_col=True
        )
        return out

    name = "ring_attention_pytorch"
    return by_autograd(name, "contiguous", attend, tokens_first=True, slow=True)


def gathered_zigzag(mask: Mask) -> Peer:
    """Make a peer of its zig_zag_attn, which gathers all keys, with a dense mask."""
    module = imported("ring_attention_pytorch.zig_zag_attention")

    @functools.cache
    def seen(tokens: int) -> Tensor:
        place = torch.arange(tokens)
        chunks = place.chunk(2 * dist.get_world_size())
        pairs = list(zip(chunks, chunks[::-1], strict=True))[: len(chunks) // 2]
        rows = torch.cat(pairs[dist.get_rank()])
        keys = torch.cat([x for pair in pairs for x in pair])
        whole = documents.visible(tokens)
        if mask is Mask.CAUSAL:
            whole = place <= place[:, None]
        return whole[rows][:, keys]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask_of_rank = seen(q.shape[2] * dist.get_world_size())
        out: Tensor = module.zig_zag_attn(q, k, v, attn_mask=mask_of_rank)
        return out

    return by_autograd("ring_attention_pytorch_zigzag", "head_tail", attend)


def yunchang(name: str, mask: Mask) -> Peer:
    """Make a peer of LongContextAttention (USP) on torch's attention.

    It splits the sequence in one dimension.
    """
    package = imported("yunchang")
    if mask is not Mask.CAUSAL:
        raise LeftOut("its attention takes no documents")
    kernels = imported("yunchang.kernels")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    degrees = (ranks, 1) if name == "yunchang_ulysses" else (1, ranks)
    package.set_seq_parallel_pg(*degrees, rank, ranks)
    module = package.LongContextAttention(
        ring_impl_type="basic_pytorch", attn_type=kernels.AttnType.TORCH_FLASH
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, causal=True)
        return out

    return by_autograd(name, "contiguous", attend, tokens_first=True)
