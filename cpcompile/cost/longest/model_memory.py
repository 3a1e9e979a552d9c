"""Bytes per rank of a training step of a decoder, by what takes them.

What a layer saves are the operands of its products, which AOTAutograd's partitioner
does not compute again, and those of attention; elements per token:

    attention: x, its norm, q, k, v, out, and the log-sum-exp in float32
    MLP: x, its norm, gate, up, and their product

At the end of the forward all layers' saved values exist, in the backward also the
gradients of one layer. They assume what Inductor fuses; not compared with it yet.

Legend: n tokens of this rank, D width, F width of the MLP, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

TILE_BYTES_ON_A_CPU = 64 * 2**20
TILE_SHARE = 128  # of the memory of an accelerator
_FLOAT32 = 4


@dataclass(frozen=True)
class Decoder:
    """A decoder with a gated MLP. tied: the head is the embedding."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of one layer: q, k, v and out, three products of the MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def table(self) -> int:
        """Of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + tables + self.hidden


@dataclass(frozen=True)
class Training:
    """How it is trained.

    element: bytes of parameters, gradients and activations.
    optimizer: bytes of its state per parameter.
    fsdp: parameters, gradients and that state are sharded over the ranks.
    checkpoint: the backward computes every layer again.
    tile: MLPs run in tiles, as the loss does in any case. tile_bytes: of one.
    offloaded: parts that are in the memory of the host.
    """

    element: int = 2
    optimizer: int = 12
    fsdp: bool = False
    checkpoint: bool = False
    tile: bool = False
    tile_bytes: int = TILE_BYTES_ON_A_CPU
    offloaded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    checkpoints: what the forward saves. attention: operands and gradients of one call.
    tiles: of the loss, and of the widest values of a layer. messages: that attention
    holds beside its operands.
    """

    parameters: float
    gradients: float
    optimizer: float
    checkpoints: float
    attention: float
    tiles: float
    messages: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))

    @property
    def step(self) -> float:
        """What a step takes while it runs, its new gradients too."""
        return self.total - self.parameters - self.optimizer


def memory_of(
    model: Decoder, how: Training, tokens: int, ranks: int, messages: float
) -> Memory:
    """Bytes of one rank that has `tokens` tokens.

    messages: bytes that attention takes beside its operands, by the cost model.
    """
    e, n = how.element, tokens
    shards = ranks if how.fsdp else 1
    largest = max(model.layer_parameters, model.table)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    per_attention = n * (
        (2 * model.hidden + 2 * q + 2 * kv) * e + _FLOAT32 * model.heads
    )
    wide = 0 if how.tile else 3 * model.feed_forward  # made again, in tiles
    per_mlp = n * (2 * model.hidden + wide) * e
    layer = per_attention + per_mlp
    saved = model.layers * layer
    if how.checkpoint:
        saved = model.layers * n * model.hidden * e + layer
    # grad of out, dq, dk, dv; grads of the product, gate and up
    attention = n * (2 * q + 2 * kv + model.hidden) * e
    mlp = float(n * (3 * model.feed_forward + model.hidden) * e)
    logits = float(3 * _FLOAT32 * n * model.vocabulary)  # with their gradient, upcast
    logits = min(logits, how.tile_bytes)
    if how.tile:
        mlp = min(mlp, n * 2 * model.hidden * e + how.tile_bytes)
    shared = {
        "parameters": model.parameters * e / shards,
        "gradients": model.parameters * e / shards,
        "optimizer": model.parameters * how.optimizer / shards,
        "checkpoints": float(saved - layer if how.checkpoint else saved),
    }
    # what is elsewhere comes, or is made, layer by layer
    at_once = {"parameters": float(largest * e), "gradients": float(largest * e)}
    at_once["checkpoints"] = float(layer)
    found = {
        part: (0.0 if part in how.offloaded else size)
        + (at_once.get(part, 0.0) if _is_partial(part, how) else 0.0)
        for part, size in shared.items()
    }
    return Memory(
        **found,
        attention=float(attention),
        # the loss is done when the backward of a layer begins
        tiles=max(logits, mlp - attention - messages, 0.0),
        messages=messages,
    )


def _is_partial(part: str, how: Training) -> bool:
    """Whether the device has less than all of a part, and so what it works on."""
    if part == "checkpoints":
        return how.checkpoint or part in how.offloaded
    return how.fsdp or part in how.offloaded
