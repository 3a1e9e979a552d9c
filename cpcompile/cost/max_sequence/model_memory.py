"""Bytes per rank of a training step of a decoder, by what takes them.

A layer saves the operands of its products, which AOTAutograd's partitioner does not
compute again, and the operands of attention. In elements per token:

    attention: x, its norm, q, k, v, out, and numbers in float32; q and k before a norm
    MLP: out as its product reads it if it was exchanged, x, its norm, gate, up, and
        their product; without a gate: up, and what the activation makes of it

Note [Moments]
A step needs the most at one of these moments, which are compared:

    end of the forward     all that is saved, a tile of logits and of their gradient,
                           the gradient of the head, what it reads, and its gradient
    backward of the last   all that is saved, gradients of the head and of the layer, a
      layer's MLP          bucket of gradients, those of x and of the wide values
      layer's attention    without what the MLP saved; gradients of x, q, k, v and out,
                           messages, and the memory of the gradients of the wide
                           values, which Inductor keeps for the next layer
    of the first layer     the same of what one layer saved, with all gradients

Gradients are None before a step. Where gradients of several steps are added up, they
are there at all moments.

Compared with what is measured: docs/results/bench_memory_fit.md.

Legend: n tokens of this rank, D width, F width of the MLP, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cpcompile.cost.plans import Strategy

EXCHANGING = (Strategy.ULYSSES, Strategy.HYBRID)  # heads against tokens
TILE_BYTES_ON_A_CPU = 64 * 2**20
TILE_SHARE = 128  # of the memory of an accelerator
# As in passes/joint/tiling/tile_tokens.py: more would take too long to compile, and
# fewer tokens to run.
MOST_TILES, LEAST_TOKENS = 64, 64
# Gradients that travel together, by default: passes/local/send_in_buckets.py.
_BUCKETS, _SMALLEST_BUCKET, _LARGEST_BUCKET = 16, 1e6, 25e6
_FLOAT32 = 4


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. tied: whether the head is the embedding.

    gated: whether the MLP has a gate. normed: whether q and k have norms of their own.
    positions: rows of a learned table of positions.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    positions: int = 0
    normed: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: q, k, v, out, MLP products, two norms; no biases."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return attention + mlp + 2 * self.hidden

    @property
    def table(self) -> int:
        """Number of parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        rest = (self.positions + 1) * self.hidden
        return self.layers * self.layer_parameters + tables + rest


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    element: bytes of parameters, gradients and activations.
    optimizer: bytes of its state per parameter.
    fsdp: parameters, gradients and that state are sharded over the ranks.
    checkpoint: the backward computes every layer again.
    tile: MLPs run in tiles, as the loss does in any case. tile_bytes: bytes of a tile.
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
    tiles: those of the loss, and of the widest values of a layer. messages: those that
    attention holds beside its operands.
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
        """Bytes that a step takes while it runs, its new gradients too."""
        return self.total - self.parameters - self.optimizer


def memory_of(
    model: Decoder,
    how: Training,
    tokens: int,
    ranks: int,
    messages: float,
    exchanged: bool = False,
) -> Memory:
    """Return the bytes of one rank that has `tokens` tokens, when it needs the most.

    messages: bytes that attention takes beside its operands, by the cost model.
    exchanged: whether q, k, v and out are in two layouts, as those of Ulysses are.
    """
    moments = _moments(model, how, tokens, messages, exchanged)
    return max(
        (_with_parameters(model, how, ranks, x) for x in moments), key=lambda m: m.total
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes that depend on the moment, see Note [Moments]."""

    gradients: float  # beside those of a rank's share
    saved: float
    layer: float  # of these, of the layer that runs
    attention: float = 0.0
    tiles: float = 0.0
    messages: float = 0.0


def _moments(
    model: Decoder, how: Training, n: int, messages: float, exchanged: bool
) -> list[_Moment]:
    """List the moments of Note [Moments]."""
    e, width = how.element, model.hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    operands = 2 * width + 2 * q + 2 * kv  # x, its norm, q, k, v, out
    operands += q + kv if model.normed else 0  # q and k before their norms
    numbers = _FLOAT32 * (model.heads + 2)  # log-sum-exp, and one per norm
    wide = model.feed_forward * (3 if model.gated else 2)
    rest = 2 * width + (q if exchanged else 0)  # out as its product reads it
    rest += 0 if how.tile else wide
    attention, layer = n * (operands * e + numbers), n * (operands + rest) * e
    layer += n * numbers
    inputs = n * width * e * (model.layers - 1)
    other_layers = inputs if how.checkpoint else (model.layers - 1) * layer

    logits = _FLOAT32 * model.vocabulary  # of a token; four values of them fill a tile
    cut = max(how.tile_bytes / (4 * logits), n / MOST_TILES, LEAST_TOKENS)
    loss = 2 * logits * min(float(n), cut)
    table = float(model.table * e)
    every = float(model.parameters * e)
    bucket = min(max(every / _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    copied = table if table < bucket and not how.fsdp else 0.0
    end = 2 * n * width * e  # what the head reads, and its gradient

    # The gradient of the product lies where one of the others has been.
    grads = n * model.feed_forward * e * (2 if model.gated else 1)
    dx = n * width * e
    mlp = float(dx + grads)
    mlp_grads = float(grads)
    if how.tile:
        mlp, mlp_grads = min(mlp, dx + n * width * e + how.tile_bytes), 0.0
    if exchanged:  # what arrives is saved, and dout exists in both layouts
        messages = max(messages - n * (q + 2 * kv) * e, 0.0)
        within = float(dx + n * 2 * q * e)
    else:
        within = float(dx + n * (2 * q + 2 * kv) * e)
    first = min(table + model.layer_parameters * e + bucket, every) - every
    moments = [_Moment(table - every, other_layers + layer + end, layer, tiles=loss)]
    for gradients, saved in ((first, other_layers), (0.0, 0.0)):
        now, there = gradients + copied, saved + attention
        moments += [
            _Moment(now, saved + layer, layer, tiles=mlp),
            _Moment(now, there, attention, within, mlp_grads, messages),
        ]
    return moments


def _with_parameters(
    model: Decoder, how: Training, ranks: int, moment: _Moment
) -> Memory:
    shards = ranks if how.fsdp else 1
    e = how.element
    saved = moment.saved - (moment.layer if how.checkpoint else 0.0)
    whole = model.parameters * e
    shared = {
        "parameters": whole / shards,
        "gradients": max(whole + moment.gradients, 0.0) / shards,
        "optimizer": model.parameters * how.optimizer / shards,
        "checkpoints": saved,
    }
    # what is elsewhere comes, or is made, layer by layer
    largest = float(max(model.layer_parameters, model.table) * e)
    at_once = {"parameters": largest, "gradients": largest}
    at_once["checkpoints"] = moment.layer
    parts = {
        part: (0.0 if part in how.offloaded else size)
        + (at_once.get(part, 0.0) if _is_partial(part, how) else 0.0)
        for part, size in shared.items()
    }
    return Memory(
        **parts,
        attention=moment.attention,
        tiles=moment.tiles,
        messages=moment.messages,
    )


def _is_partial(part: str, how: Training) -> bool:
    """Tell whether the device has less than all of a part, and so what it works on."""
    if part == "checkpoints":
        return how.checkpoint or part in how.offloaded
    return how.fsdp or part in how.offloaded
