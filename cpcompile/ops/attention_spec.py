"""What an attention call computes, as one value from the graph to the kernel.

    cp.ring_attention(
        q, k, v, [bias, sinks], [Sq, Sk], "causal zigzag scale=0.1 +bias +sinks", group
    )

All operators have these arguments. The spec says in words what is computed, and which
tensors the list in front of it holds. So it is a part of every cache key, and a graph
that is printed can be read. A new modifier is a field here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cpcompile.geometry.layout import Layout
from cpcompile.kernels.score_functions import triton_functions

MASK_FIELDS = ("bias", "key_ranges", "q_segment_ids", "kv_segment_ids")
EXTRAS = (*MASK_FIELDS, "seeds", "sinks")
Masks = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_POSITION_DIMS = 3  # of a bias of positions; one of pairs has four


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention call computes, without its tensors and sizes.

    scale: factor of the scores.
    is_causal: whether the query at global position p sees the keys at positions <= p.
        A mask has it in its key ranges.
    layout: in which queries and keys are dealt to the ranks; under a mask contiguous,
        or zigzag without a bias of pairs.
    extras: the names of the tensors that are given, in the order of EXTRAS; see
        AttentionInputs.
    mask_key: the name of key ranges and segment ids in mask_cache.py, if kept there.
    softcap: c > 0 makes c * tanh(s / c) of the scaled scores s, before a bias.
    dropout_p: weights are dropped with this probability.
    score_mod: the text of a function of scores, see score_mod.py. Then the bias is
        [1, 1, n], the values that it reads, whole and the same on every rank.
    first_head, last_head: the numbers that a score_mod has for the first of these
        heads, and for the last of all. Heads past it are padding, and have its number.
    head_groups: in how many parts at most heads are exchanged, one after the other, by
        Ulysses.
    whole_keys: whether every rank has all keys and values, in the sequence's order.
    wants_lse: whether the log-sum-exp is read. Operators that have it at no cost return
        it in any case.
    """

    scale: float
    is_causal: bool = False
    layout: Layout = Layout.CONTIGUOUS
    extras: tuple[str, ...] = ()
    mask_key: str = ""
    softcap: float = 0.0
    dropout_p: float = 0.0
    score_mod: str = ""
    first_head: int = 0
    last_head: int = 0
    head_groups: int = 1
    whole_keys: bool = False
    wants_lse: bool = False

    def __str__(self) -> str:
        """Return the text that operators take, which `of_text` reads."""
        words = ["causal"] if self.is_causal else []
        if self.layout is not Layout.CONTIGUOUS:
            words.append(self.layout.value)
        words.append(f"scale={self.scale!r}")
        words += [
            f"{name}={value!r}"
            for name, default in _NUMBERS.items()
            if (value := getattr(self, name)) != default
        ]
        if self.mask_key:
            words.append(f"mask_key={self.mask_key}")
        words += [f"+{name}" for name in self.extras]
        if self.whole_keys:
            words.append("whole_keys")
        if self.wants_lse:
            words.append("lse")
        if self.score_mod:  # the last one: it has spaces
            words.append(f"score_mod={json.dumps(self.score_mod)}")
        return " ".join(words)

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of_text(cls, text: str) -> AttentionSpec:
        """Undo `str`; raise ValueError for a word that is none of a spec."""
        words, _, score_mod = text.partition("score_mod=")
        fields: dict[str, Any] = {"extras": ()}
        if score_mod:
            fields["score_mod"] = json.loads(score_mod)
        for word in words.split():
            name, equals, value = word.partition("=")
            if word in _FLAGS:
                fields[_FLAGS[word]] = True
            elif word.startswith("+") and word[1:] in EXTRAS:
                fields["extras"] += (word[1:],)
            elif equals and name in _READ:
                fields[name] = _READ[name](value)
            elif not equals and word in _LAYOUTS:
                fields["layout"] = Layout(word)
            else:
                raise ValueError(
                    f"attention: got {word!r} in the spec {text!r}; needed one of "
                    f"{list(_FLAGS)}, a layout of {_LAYOUTS}, a tensor of "
                    f"{['+' + x for x in EXTRAS]}, or a value of {list(_READ)}: make "
                    "the text by AttentionSpec"
                )
        if "scale" not in fields:
            raise ValueError(
                f"attention: got the spec {text!r}; needed a scale in it: make the "
                "text by AttentionSpec"
            )
        return cls(**fields)

    def with_extras(
        self, tensors: Mapping[str, Any | None]
    ) -> tuple[AttentionSpec, list[Any]]:
        """Return the spec that names these tensors, and the list of them."""
        names = tuple(name for name in EXTRAS if tensors.get(name) is not None)
        return replace(self, extras=names), [tensors[name] for name in names]

    @property
    def changes_scores(self) -> bool:
        """Tell whether scores or weights are changed, which no kernel of aten does."""
        return self.softcap != 0 or self.dropout_p != 0 or self.score_mod != ""

    @property
    def has_mask(self) -> bool:
        """Tell whether a tensor hides keys or is added to the scores."""
        return any(name in MASK_FIELDS for name in self.extras)

    @property
    def has_modifiers(self) -> bool:
        """Tell whether there is a mask, or scores or weights are changed."""
        return self.has_mask or self.changes_scores


_FLAGS = {"causal": "is_causal", "whole_keys": "whole_keys", "lse": "wants_lse"}
_NUMBERS = {
    "softcap": 0.0,
    "dropout_p": 0.0,
    "first_head": 0,
    "last_head": 0,
    "head_groups": 1,
}
_READ: dict[str, Any] = {
    "scale": float,
    "softcap": float,
    "dropout_p": float,
    "first_head": int,
    "last_head": int,
    "head_groups": int,
    "mask_key": str,
}
_LAYOUTS = [x.value for x in Layout]


@dataclass(frozen=True)
class AttentionInputs:
    """A spec, and the tensors that it names; None for any other.

    bias: [B or 1, H or 1, local queries, kv_len], bool (True is visible) or added to
        the scaled scores; -inf and the lowest finite number hide a key. Or added and of
        positions, whole and the same on every rank: [B or 1, H or 1, kv_len] by key, or
        [B or 1, H or 1, q_len + kv_len - 1] by distance, from key - query = 1 - q_len
        on.
    key_ranges: [B or 1, q_len, 2], integers: query i sees the keys at positions
        key_ranges[b, i, 0] <= j < key_ranges[b, i, 1].
    q_segment_ids, kv_segment_ids: [B or 1, q_len] and [B or 1, kv_len], integers: a
        query sees the keys with its own id. Key ranges and segment ids are in the order
        of the sequence, whole and the same on every rank, in any layout. A query sees a
        key if key ranges, segment ids and a bool bias all say so.
    seeds: [B, H], integers; which weights are dropped is a function of them and of the
        positions of query and key.
    sinks: [H], a score that takes part in the softmax of every row of its head, and has
        no value.
    """

    spec: AttentionSpec
    bias: Tensor | None = None
    key_ranges: Tensor | None = None
    q_segment_ids: Tensor | None = None
    kv_segment_ids: Tensor | None = None
    seeds: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, spec: str, extras: Sequence[Tensor]) -> AttentionInputs:
        """Read the arguments of an operator.

        Raises: ValueError for other tensors than the spec names.
        """
        own = AttentionSpec.of_text(spec)
        if len(own.extras) != len(extras):
            raise ValueError(
                f"attention: got {len(extras)} tensors with the spec {spec!r}; needed "
                f"{len(own.extras)}: {list(own.extras)}"
            )
        return cls(own, **dict(zip(own.extras, extras, strict=True)))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name, in the order of EXTRAS."""
        by_name = {name: getattr(self, name) for name in EXTRAS}
        return {name: x for name, x in by_name.items() if x is not None}

    def arguments(self) -> tuple[list[Tensor], str]:
        """Return extras and spec, as operators take them."""
        spec, extras = self.spec.with_extras(self.tensors)
        return extras, str(spec)

    @property
    def masks(self) -> Masks:
        """The tensors of the mask, in the order of MASK_FIELDS."""
        return self.bias, self.key_ranges, self.q_segment_ids, self.kv_segment_ids

    @property
    def has_modifiers(self) -> bool:
        """Tell whether there is a mask, or scores or weights are changed."""
        return self.spec.changes_scores or any(x is not None for x in self.masks)

    @property
    def added(self) -> Tensor | None:
        """The bias that is added to the scores, or hides some."""
        return None if self.spec.score_mod else self.bias

    @property
    def has_table(self) -> bool:
        """Tell whether there is a bias of positions."""
        return self.added is not None and is_of_positions(self.added)

    def inlined(self, bias_grad: bool) -> str | None:
        """Return the functions of a score_mod for the step templates.

        None without a score_mod, and for one that has no such functions. None also if
        what it captures has a gradient, which the templates do not compute.
        """
        if not self.spec.score_mod or bias_grad:
            return None
        heads = self.spec.first_head, self.spec.last_head
        return triton_functions(self.spec.score_mod, *heads)


PLAIN = AttentionInputs(AttentionSpec(scale=1.0))


def is_of_positions(bias: Tensor) -> bool:
    """Tell whether a bias is one of keys or distances, the same on every rank."""
    return bias.ndim == _POSITION_DIMS
