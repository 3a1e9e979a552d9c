"""Write flex_attention out as products and a softmax, as attention by hand is.

    flex_attention(q, k, v, score_mod, (.., mask_mod), scale, ..)
      ->
    scores = matmul(q, k.mT) * scale
    scores = score_mod(scores, b, h, q_idx, kv_idx)     its calls, on all pairs at once
    scores = where(mask_mod(b, h, q_idx, kv_idx), scores, -inf)
    out = matmul(softmax(scores), v)

b, h, q_idx and kv_idx are aranges of one dimension each. A score_mod or mask_mod is
pointwise, as torch demands of it, so that its calls broadcast. What they say is read
from them as from any mask or bias; a block mask that was made from mask_mod is not
needed. What the next pass would not know becomes one call with a text of aten calls,
forward and backward (score_programs). Without a text, and left to products and a
softmax, are writes in place, random numbers and constants that are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import is_symbol
from cpcompile.logs import warn_unmet
from cpcompile.ops.plain_attention import log_sum_exp, plain_attention
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...graph.attention_calls import is_flex_attention
from ...graph.calls import function_of, spelled
from ...graph.nodes import (
    all_nodes,
    attribute_value,
    fake_mode_of,
    fake_value,
    insert_call,
    where,
)
from .match_attention import read_softmax
from .score_programs import can_be_packed, score_program, values_dtype

# What torch puts into kernel_options itself.
_USUAL = frozenset(
    {"BACKEND", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS",
     "WRITE_DQ", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX"}
)  # fmt: skip


def decompose_flex_attention(graph: fx.Graph) -> int:
    """Rewrite every call of flex_attention; return how many are written out.

    Raises: RewriteError for a block mask that only its blocks say.
    """
    calls = [node for node in all_nodes(graph) if is_flex_attention(node)]
    texts: dict[Any, str | None] = {}  # layers share them
    return sum([_Writer(node, fake_mode_of(graph), texts).write() for node in calls])


# The size of blocks of a call without a block mask.
_NO_BLOCKS = 1 << 30


class _Writer:
    """Writer of the calls that replace one flex_attention.

    texts: of score_mods of the same calls, for each dtype of the queries.
    """

    def __init__(
        self, node: fx.Node, fake_mode: FakeTensorMode, texts: dict[Any, str | None]
    ) -> None:
        self.node, self.fake_mode, self.texts = node, fake_mode, texts
        self.inserted: list[fx.Node] = []

    def write(self) -> bool:
        """Replace the call; returns True if it is written out, False if it is one."""
        args: tuple[Any, ...] = self.node.args
        q, k, v, score_mod, block_mask, scale, options, *buffers = args
        self._warn_about(options)
        with self.node.graph.inserting_before(self.node):
            whole = self._write(q, k, v, score_mod, block_mask, scale, *buffers)
        for user in list(self.node.users):
            assert not user.users, "results of flex_attention are parts of a tuple"
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)
        return not whole

    def _write(
        self,
        q: Any,
        k: Any,
        v: Any,
        score_mod: Any,
        block_mask: Any,
        scale: Any,
        of_score: Sequence[Any] = (),
        of_mask: Sequence[Any] = (),
    ) -> bool:
        shape, dtype = fake_value(q).shape, fake_value(q).dtype
        group = shape[1] // fake_value(k).shape[1]
        if group > 1:
            k, v = (self.call(torch.repeat_interleave, x, group, 1) for x in (k, v))
        batch = fake_value(k).shape[0]
        if batch != shape[0]:
            k, v = (
                self.call(torch.Tensor.expand, x, self._size(q, 0), -1, -1, -1)
                for x in (k, v)
            )
        index = [
            self._positions(self._size(x, min(dim, 2)), dim, fake_value(q).device)
            for dim, x in enumerate((q, q, q, k))
        ]
        keys = self.call(torch.transpose, k, -2, -1)
        scores = self.call(torch.mul, self.call(torch.matmul, q, keys), scale)
        upcast = torch.promote_types(dtype, torch.float32)
        if upcast != dtype:
            scores = self.call(torch.Tensor.to, scores, upcast)
        scores = self._inlined(score_mod, (scores, *index, *of_score))
        mask_mod, block_size = block_mask[-1], block_mask[-2]
        if _hides_nothing(mask_mod) and block_size < _NO_BLOCKS:
            raise RewriteError(
                f"flex_attention at {where(self.node)}: got a block mask whose "
                "mask_mod hides nothing, of which torch's kernels use the blocks alone "
                "and its eager mode nothing; needed a mask_mod that says what is "
                "hidden: create_block_mask(mask_mod, ...), or pass no block mask"
            )
        visible = None
        if not _hides_nothing(mask_mod):
            visible = self._inlined(mask_mod, (*index, *of_mask))
            scores = self.call(torch.where, visible, scores, float("-inf"))
        softmax = self.call(torch._safe_softmax, scores, -1)
        results = {0: self._weighted(softmax, v, dtype)}
        numbers: list[Any] = [user.args[1] for user in self.node.users]
        for number in numbers:
            if number not in results:
                results[number] = self._in_base_2(scores, number)
        whole = None
        if read_softmax(softmax) is None and {*numbers} <= {0, 1}:
            functions = (score_mod, None if visible is None else mask_mod)
            packed = self._packed(functions, of_score, of_mask, q)
            if packed is not None:
                whole = self._whole((q, k, v), scale, visible, packed, 1 in numbers)
        for user, number in zip(list(self.node.users), numbers, strict=True):
            user.replace_all_uses_with((whole or results)[number])
        protected = () if whole else (results[0],)  # its weights may be read alone
        for node in reversed(self.inserted):
            if not node.users and node not in protected:
                self.node.graph.erase_node(node)
        return whole is not None

    def _packed(
        self,
        functions: tuple[fx.Node, fx.Node | None],
        of_score: Sequence[Any],
        of_mask: Sequence[Any],
        q: fx.Node,
    ) -> tuple[str, fx.Node] | None:
        """Return the text of both functions, and the values they read as one tensor."""
        score = attribute_value(functions[0])
        mask = None if functions[1] is None else attribute_value(functions[1])
        of_mask = () if mask is None else of_mask
        captured = [fake_value(x) for x in (*of_score, *of_mask)]
        if not can_be_packed(captured):
            return None
        here, there = captured[: len(of_score)], captured[len(of_score) :]
        captured_specs = [
            (tuple(map(int, x.shape)), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor)
            else int(x)
            for x in captured
        ]
        key = (
            fake_value(q).dtype,
            score.code,
            None if mask is None else mask.code,
            len(here),
            *captured_specs,
        )
        if key not in self.texts:
            self.texts[key] = score_program(score, mask, here, there, fake_value(q))
        text = self.texts[key]
        if text is None:
            return None
        dtype = values_dtype(captured, fake_value(q))
        flat = [
            self.call(torch.Tensor.to, self.call(torch.reshape, x, (-1,)), dtype)
            for x in (*of_score, *of_mask)
            if isinstance(fake_value(x), torch.Tensor)
        ]
        device = fake_value(q).device
        if not flat:
            values = self.call(torch.zeros, (1, 1, 1), dtype=dtype, device=device)
        else:
            values = self.call(torch.reshape, self.call(torch.cat, flat), (1, 1, -1))
        return text, values

    def _whole(
        self,
        operands: tuple[Any, Any, Any],
        scale: Any,
        visible: fx.Node | None,
        packed: tuple[str, fx.Node],
        gives_lse: bool,
    ) -> dict[int, fx.Node]:
        """Insert one call that has a function of the scores; returns its results."""
        q, k, v = operands
        text, values = packed
        kwargs = {"scale": scale, "score_mod": text, "values": values}
        if visible is not None:
            kwargs["attn_mask"] = visible
        results = {0: self.call(plain_attention, q, k, v, **kwargs)}
        if gives_lse:
            lse = self.call(log_sum_exp, results[0], q, k, **kwargs)
            results[1] = self.call(torch.mul, lse, 1 / math.log(2))
        return results

    def _weighted(self, weights: fx.Node, v: Any, dtype: torch.dtype) -> fx.Node:
        if fake_value(weights).dtype != dtype:
            weights = self.call(torch.Tensor.to, weights, dtype)
        return self.call(torch.matmul, weights, v)

    def _in_base_2(self, scores: fx.Node, number: int) -> fx.Node:
        """Insert the log-sum-exp or the maximum of the scores, in base 2."""
        function = torch.logsumexp if number == 1 else torch.amax
        return self.call(torch.mul, self.call(function, scores, -1), 1 / math.log(2))

    def _size(self, x: fx.Node, dim: int) -> Any:
        """Return a size as an argument: a node where it is a symbol."""
        size = fake_value(x).shape[dim]
        return self.call(torch.Tensor.size, x, dim) if is_symbol(size) else int(size)

    def _positions(self, size: Any, dim: int, device: torch.device) -> fx.Node:
        """Insert positions, in int32 as torch has them, in one of four dimensions."""
        kwargs = {"dtype": torch.int32, "device": device}
        numbers = self.call(torch.arange, size, **kwargs)
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        return self.call(torch.reshape, numbers, shape)

    def _inlined(self, function: Any, operands: Sequence[Any]) -> fx.Node:
        """Inline a graph that is called on scalars, for tensors of all pairs."""
        module = attribute_value(function)
        values: dict[fx.Node, Any] = dict(
            zip(module.graph.find_nodes(op="placeholder"), operands, strict=True)
        )
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self.call(function_of(node), *args, **kwargs)
            elif node.op == "get_attr":
                raise AssertionError(f"{node.target} of a score_mod is no input of it")
        (result,) = module.graph.output_node().args
        if isinstance(result, tuple | list):
            (result,) = result
        output: fx.Node = values[result]
        return output

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, with its fake value."""
        with self.fake_mode:
            fake_args, fake_kwargs = fx.node.map_aggregate((args, kwargs), fake_value)
            value = target(*fake_args, **fake_kwargs)
        node = insert_call(
            self.node.graph, target, args, like=self.node, value=value, kwargs=kwargs
        )
        self.inserted.append(node)
        return node

    def _warn_about(self, options: Any) -> None:
        """Warn of options that are for torch's own kernel, and not used."""
        unused = sorted(set(options or ()) - _USUAL)
        if unused:
            at = f"flex_attention at {where(self.node)}"
            why = "these are for torch's own kernel"
            warn_unmet(at, f"kernel_options {unused}", why)


def _hides_nothing(mask_mod: Any) -> bool:
    """Tell whether a mask_mod is that of a call without a block mask."""
    result = attribute_value(mask_mod).graph.output_node().args[0]
    if isinstance(result, tuple | list):
        (result,) = result
    return isinstance(result, fx.Node) and spelled(result) in ("new_ones", "ones")
