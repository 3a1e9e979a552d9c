"""Prompts and single tokens over a key/value cache, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros

from cpcompile import config
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.composition.exchanged import Exchanged
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, whole

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH = 61, 32, 4, 2, 2, 2
HEAD_DIM = WIDTH // HEADS
NEW = 3  # tokens

Caches = list[tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """Attention over a static cache, which is written in one of two usual ways."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(2))

    def forward(
        self, x: Tensor, position: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        for cache, rows in ((keys, k), (values, v)):
            if self.write == "index_copy_":
                cache.index_copy_(2, position, rows)
            else:
                cache[:, :, position] = rows
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(write) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, position: Tensor, caches: Caches) -> Tensor:
        length = caches[0][0].shape[2]
        mask = torch.arange(length, device=tokens.device) <= position[:, None]
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, position, mask, *cache)
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Case:
    ranks: int = 2
    sharded: bool = True
    write: str = "index_copy_"
    inner: str = "aot_eager"
    eager_tokens: bool = False  # only the prompt is compiled
    dp: int = 1  # the mesh is dp x cp, and all ranks have the whole batch
    length: int = 41  # of the cache
    prompts: tuple[int, ...] = (19,)  # lengths, one after another on the same model

    def __str__(self) -> str:
        words = ["sharded" if self.sharded else "whole", self.write, self.inner]
        words += ["eager"] * self.eager_tokens + ["short"] * (self.length < 41)
        words += ["dp"] * (self.dp > 1) + ["prompts"] * (len(self.prompts) > 1)
        return "-".join([str(self.ranks), *words])


def new_caches(length: int, mesh: DeviceMesh | None) -> Caches:
    shape = (BATCH, KV_HEADS, length, HEAD_DIM)

    def new() -> Tensor:
        if mesh is None:
            return torch.zeros(shape, dtype=torch.float64)
        parts = [*[Replicate()] * (mesh.ndim - 1), Shard(2)]
        return zeros(shape, dtype=torch.float64, device_mesh=mesh, placements=parts)

    return [(new(), new()) for _ in range(LAYERS)]


Step = Callable[[Tensor, Tensor, Caches], Tensor]


@torch.no_grad()
def decoded(first: Step, then: Step, caches: Caches, prompt: int) -> dict[str, Tensor]:
    """Logits of a prompt and of the tokens after it, each the likeliest."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, prompt), generator=generator)
    found = {"prompt": first(tokens, torch.arange(prompt), caches)}
    for place in range(prompt, prompt + NEW):
        token = list(found.values())[-1][:, -1:].argmax(-1)
        found[f"token {place}"] = then(token, torch.tensor([place]), caches)
    for number, (keys, values) in enumerate(caches):
        found |= {f"keys {number}": whole(keys), f"values {number}": whole(values)}
    return found


CASES = [
    Case(),
    Case(3, write="setitem"),
    Case(4, write="setitem"),
    Case(4, length=9, prompts=(5,)),  # one rank has no part
    Case(4, dp=2),
    Case(prompts=(20, 24, 28, 19)),
    Case(2, sharded=False),
    Case(3, sharded=False, write="setitem"),
    Case(2, sharded=False, eager_tokens=True),
    Case(inner="inductor"),
    Case(2, sharded=False, inner="inductor", write="setitem"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(lambda case: case.ranks, timeout=180)
def test_a_prompt_and_tokens(case: Case) -> None:
    """One graph for every length of prompt, and one for any number of tokens."""
    counters.clear()
    mesh = sequence_mesh(case.ranks)
    if case.dp > 1:
        shape = (case.dp, case.ranks // case.dp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    model = Decoder(case.write).double()
    compiled = compiled_on(mesh, model, inner=case.inner)
    then = model if case.eager_tokens else compiled
    found = []
    for prompt in case.prompts:
        exact = decoded(model, model, new_caches(case.length, None), prompt)
        caches = new_caches(case.length, mesh if case.sharded else None)
        got = decoded(compiled, then, caches, prompt)
        found += deviations(got, exact)
    graphs = counters["stats"]["unique_graphs"]
    check(found)
    assert graphs == len(case.prompts) + (not case.eager_tokens)


@on_ranks(2)
def test_one_collective_per_layer() -> None:
    """Of (out, lse); neither keys nor activations travel."""
    model = Decoder("index_copy_").double()
    compiled = compiled_on(2, model)
    caches = new_caches(41, sequence_mesh(2))
    given = torch.zeros(BATCH, 1, dtype=torch.int64), torch.tensor([3]), caches
    with torch.no_grad(), config.patch(check_ranks=0):
        compiled(*given)
        with Exchanged("c10d::", "_c10d_functional::") as found:
            compiled(*given)
    assert found == {"c10d::_allgather_base_": LAYERS}, found
