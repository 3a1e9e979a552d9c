"""What sequence mixers read, keep and compute, by their shapes.

    kind              reads of a token                 state of a sequence
    gated_delta_rule  q, k; v; g, beta per head        value heads [K, V], rows mixed
    kda               the same, g for every key dim    the same
    mamba2            x; dt; B, C of every key head    value heads [V, K], decays
    mamba             u, delta; B, C of all channels   channels [K], not passed on

Key heads of mamba2 are its groups, key dims are what its papers call the state; mamba
has one channel per value head and value dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_prices import BYTES_OF_STATES


class MixerKind(Enum):
    """A sequence mixer that is no softmax attention."""

    GATED_DELTA_RULE = "gated_delta_rule"
    KDA = "kda"
    MAMBA2 = "mamba2"
    MAMBA = "mamba"


_DELTA_RULES = (MixerKind.GATED_DELTA_RULE, MixerKind.KDA)
_CHUNK_TOKENS = {MixerKind.MAMBA2: 256}  # of mamba_ssm; of others, which are fla's:
_CHUNK_TOKENS_OF_FLA = 64
# Part of attention's rate that a forward by chunks reaches. fla on H800, 128 dims:
# 32768 tokens, 64 heads of a gated delta rule in 4.808 ms (fla-org/
# flash-linear-attention#691), 8192 tokens, 96 heads of KDA in 3.268 ms (PaddlePaddle/
# flash-attention#133). Assumed of other kinds.
_PART_OF_RATE = {MixerKind.KDA: 0.12}
_PART_OF_RATE_OF_OTHERS = 0.24
_FLOPS_OF_A_SCAN = 9  # per channel and state: Dao and Gu, arXiv 2405.21060, appendix


@dataclass(frozen=True)
class TokenValue:
    """An operand or a result: numbers of one token, in heads; one head is for all.

    has_channels: whether its numbers are those of values, which keep apart.
    """

    numbers: int
    heads: int
    has_channels: bool = False


@dataclass(frozen=True)
class MixerShape:
    """One call of a mixer over the whole sequences of a batch."""

    kind: MixerKind
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    bytes_per_element: int

    @property
    def entries(self) -> int:
        """Heads, or channels, that keep apart."""
        return self.value_heads * self.value_dim // self.entry_dim

    @property
    def entry_dim(self) -> int:
        """Numbers of a value that an entry has."""
        return 1 if self.kind is MixerKind.MAMBA else self.value_dim

    @property
    def result(self) -> TokenValue:
        """The result."""
        return TokenValue(self.value_heads * self.value_dim, self.entries, True)

    @property
    def operands(self) -> tuple[TokenValue, ...]:
        """The operands that have tokens."""
        values = self.result
        keys = TokenValue(self.key_heads * self.key_dim, self.key_heads)
        gate = TokenValue(self.value_heads, self.value_heads)
        if self.kind is MixerKind.KDA:
            gates = TokenValue(self.value_heads * self.key_dim, self.value_heads)
            return keys, keys, values, gates, gate
        if self.kind is MixerKind.GATED_DELTA_RULE:
            return keys, keys, values, gate, gate
        if self.kind is MixerKind.MAMBA2:
            return values, gate, keys, keys
        return values, values, keys, keys

    @property
    def state(self) -> tuple[tuple[int, ...], int | None, int | None] | None:
        """Shape of the state, and its dimensions that are mixed and of values.

        None if the function takes no state.
        """
        if self.kind is MixerKind.MAMBA:
            return None
        shape = (self.batch, self.value_heads, self.key_dim, self.value_dim)
        return (shape, 2, 3) if self.kind in _DELTA_RULES else (shape, None, None)

    def nbytes(self, value: TokenValue) -> int:
        """Return the bytes of a value of all tokens."""
        return self.batch * self.tokens * value.numbers * self.bytes_per_element

    def forward_seconds(self, profile: HardwareProfile) -> float:
        """Return the seconds of the forward for all tokens on one device.

        A kernel computes products chunk by chunk, at the speed of published kernels.
        """
        read = sum(map(self.nbytes, self.operands)) / profile.memory_bytes_per_second
        rate = profile.forward_flops_per_second
        tokens = self.batch * self.tokens
        if self.kind is MixerKind.MAMBA:  # no products: in float32, number by number
            flops = _FLOPS_OF_A_SCAN * self.entries * self.key_dim
            return read + tokens * flops / (rate * profile.speed(BYTES_OF_STATES))
        part = _PART_OF_RATE.get(self.kind, _PART_OF_RATE_OF_OTHERS)
        rate *= part * profile.speed(self.bytes_per_element)
        return read + tokens * self._flops_by_chunks() / rate

    def _flops_by_chunks(self) -> float:
        """Return 2 per product of the forward, of one token."""
        chunk = _CHUNK_TOKENS.get(self.kind, _CHUNK_TOKENS_OF_FLA)
        keys, values = self.key_dim, self.value_dim
        products = chunk * (keys + values) + 2 * keys * values  # scores, states
        if self.kind in _DELTA_RULES:  # k k', what it leaves of keys and values
            products += chunk * (2 * keys + values) + keys * values
        return 2.0 * math.prod((self.value_heads, products))
