"""Compares what is read of a mask with what the model computes, element by element.

`read` traces a function with Dynamo and runs the passes up to rewrite_masks. `check`
runs the graph before and after on real inputs: what key ranges, segment ids and bias
say together has to be the mask.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from cpcompile.frontend.arguments import module_buffers
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.geometry.masks import Mask
from cpcompile.passes.graph.attention_calls import is_attention
from cpcompile.passes.graph.context import AttentionCall, Context
from cpcompile.passes.graph.nodes import all_nodes, fake_value, sub_graph
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.rewrite_masks import rewrite_masks
from tests.support.position_biases import of_pairs

HIDDEN = -1e30


@dataclass
class Found:
    """A graph before and after its masks were read."""

    before: fx.GraphModule
    after: fx.GraphModule
    ctx: Context
    count: int
    compiled: Callable[..., Any]
    seen: list[tuple[Any, ...]]  # the inputs of the graph, call by call

    @property
    def calls(self) -> list[AttentionCall]:
        return self.ctx.findings.calls

    @property
    def masks(self) -> list[Mask | None]:
        return [self.ctx.findings.masks.get(call) for call in self.calls]

    @property
    def texts(self) -> list[str]:
        """What is said of the mask of every call."""
        return list(map(text_of, self.calls, self.masks))

    @property
    def text(self) -> str:
        """Of the first call, or "unread"."""
        mask = self.masks[0]
        return "unread" if mask is not None and mask.unread else self.texts[0]


def text_of(call: AttentionCall, mask: Mask | None) -> str:
    """The text of a mask, or "refused", "is_causal", "none"."""
    if mask is not None:
        return mask.text
    if call.mask is not None:
        return "refused"
    return "is_causal" if call.is_causal else "none"


def any_length(gm: fx.GraphModule) -> tuple[fx.GraphModule, torch.SymInt]:
    """A copy of the graph, and the symbol of its length, which becomes its only one."""
    shapes = (getattr(fake_value(x), "shape", ()) for x in gm.graph.nodes)
    length = next(shape[2] for shape in shapes if len(shape) == 4)
    specialize_sizes(gm.graph, length)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph), length


def attend(mask_of: Callable[..., Any]) -> Callable[..., Tensor]:
    """A model that is one attention call with the mask `mask_of(q, k, *inputs)`."""

    def model(q: Tensor, k: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask_of(q, k, *inputs))

    return model


def operands(
    queries: int, keys: int | None = None, batch: int = 2, heads: int = 2
) -> tuple[Tensor, Tensor]:
    keys = queries if keys is None else keys
    return torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4)


def read(
    fn: Callable[..., Any],
    *inputs: Any,
    strict: bool = True,
    whole_mask_share: float = 1.0,
    dynamic: bool = False,
    **keywords: Any,
) -> Found:
    """Trace `fn(*inputs)`, with a symbol for the length if dynamic; read its masks."""
    found: list[Found] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        before, length = any_length(gm) if dynamic else (copy.deepcopy(gm), None)
        ctx = Context(
            mesh=mock.Mock(**{"size.return_value": 1}),  # no group of ranks is needed
            axis=0,
            inputs={},
            profile=None,
            strict=strict,
            whole_mask_share=whole_mask_share,
            buffers={} if dynamic else module_buffers(gm.graph),
            length=length,
        )
        find_attention(gm.graph, ctx)
        count = rewrite_masks(gm.graph, ctx)
        gm.graph.lint()
        gm.recompile()
        found.append(Found(before, gm, ctx, count, compiled, []))

        def run(*args: Any) -> Any:
            found[0].seen.append(args)
            return before(*args)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled(*inputs, **keywords)
    (result,) = found
    return result


def check_read(fn: Callable[..., Any], text: str, *inputs: Any, **how: Any) -> Found:
    """Read the masks of `fn(*inputs)`, of which the first is called so; check them."""
    found = read(fn, *inputs, **how)
    assert found.text == text, found.masks
    check(found, *inputs)
    return found


class Recorder(fx.Interpreter):
    """Runs a graph, and the regions in it, and keeps every value."""

    def __init__(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values = values

    def run_node(self, n: fx.Node) -> Any:
        region = sub_graph(n)
        if region is not None:
            _, *args = self.fetch_args_kwargs_from_env(n)[0]
            result = Recorder(region, self.values).run(*args)
        else:
            if is_attention(n):
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
                self.values[n, "mask"] = None if mask is None else mask.clone()
            result = super().run_node(n)
        self.values[n] = result
        return result


def masks_of(module: fx.GraphModule, inputs: tuple[Any, ...]) -> list[Any]:
    """The attn_mask of every call, when it is used."""
    values: dict[Any, Any] = {}
    Recorder(module, values).run(*inputs)
    return [
        values[node, "mask"] for node in all_nodes(module.graph) if is_attention(node)
    ]


def check(found: Found, *model_inputs: Any, **keywords: Any) -> None:
    """Assert that what was read is the mask of every call, for these inputs too."""
    found.compiled(*model_inputs, **keywords)
    inputs = found.seen[-1]
    expected = masks_of(found.before, copy.deepcopy(inputs))
    values: dict[Any, Any] = {}
    Recorder(found.after, values).run(*copy.deepcopy(inputs))
    for call, mask, wanted in zip(found.calls, found.masks, expected, strict=True):
        if wanted is None:
            assert mask is None and call.mask is None
            continue
        q, k = values[call.q], values[call.k]
        compare(wanted, call, mask, values, (q.shape[0], q.shape[-2], k.shape[-2]))


def compare(
    wanted: Tensor,
    call: AttentionCall,
    mask: Mask | None,
    values: dict[Any, Any],
    sizes: tuple[int, int, int],
) -> None:
    batch, queries, keys = sizes
    heads = max(4 - wanted.ndim, 0)
    if len(call.q_shape) == 3 and wanted.ndim == 3:
        wanted = wanted.unsqueeze(1)
    else:
        wanted = wanted[(None,) * heads]
    heads = wanted.shape[1]
    whole = (batch, heads, queries, keys)
    seen = torch.ones(whole, dtype=torch.bool)
    if call.mask is not None and mask is None:
        assert call.unsupported is not None, "a mask that is not read is refused"
        return
    if call.is_causal:
        seen &= torch.ones(queries, keys, dtype=torch.bool).tril()
    bias = None
    if mask is not None:
        seen &= says(mask, values, batch, queries, keys)
        bias = values.get(mask.bias)
    if bias is not None and bias.ndim == 3:
        assert bias.dtype == wanted.dtype and bias.shape[0] in (1, batch)
        pairs = of_pairs(bias, queries, keys).expand(whole)
        visible = (wanted > HIDDEN).expand(whole)
        assert torch.equal(seen.expand_as(visible), visible)
        assert torch.equal(pairs[visible], wanted.expand(whole)[visible])
        return
    if bias is not None:
        assert bias.ndim == 4 and bias.shape[2:] == (queries, keys), bias.shape
        assert bias.shape[0] in (1, batch)
        if bias.dtype == torch.bool:
            seen = seen & bias
        else:
            assert (seen | (wanted < HIDDEN)).all(), "what is hidden beside the bias"
            assert bias.dtype == wanted.dtype
            torch.testing.assert_close(
                bias.expand(*whole[:1], -1, -1, -1).expand(whole),
                wanted.expand(whole),
                rtol=0,
                atol=0,
            )
            return
    if wanted.dtype == torch.bool:
        visible = wanted.expand(whole)
    else:
        assert ((wanted == 0) | (wanted < HIDDEN)).all(), "only then it is no bias"
        visible = (wanted == 0).expand(whole)
        finite = ~torch.isinf(wanted).expand(whole)
        alone = ~visible.any(-1)
        assert not (finite & alone[..., None]).any(), "a row that sees all, by softmax"
    different = (seen.expand_as(visible) != visible).nonzero()
    assert not len(different), (
        f"{call.unsupported}: differs at {different[:5].tolist()} of {whole}: "
        f"{mask and mask.text}"
    )


def says(
    mask: Mask, values: dict[Any, Any], batch: int, queries: int, keys: int
) -> Tensor:
    """[B, 1, Sq, Sk] of key ranges and segment ids."""
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if mask.key_ranges is not None:
        key_ranges = values[mask.key_ranges]
        assert key_ranges.dtype == torch.int32 and key_ranges.ndim == 3
        assert key_ranges.shape[0] in (1, batch) and key_ranges.shape[1:] == (
            queries,
            2,
        )
        j = torch.arange(keys)
        lo, hi = key_ranges[:, None, :, None, 0], key_ranges[:, None, :, None, 1]
        seen = seen & (lo <= j) & (j < hi)
    assert (mask.q_segment_ids is None) == (mask.kv_segment_ids is None)
    if mask.q_segment_ids is not None:
        q_segment_ids, kv_segment_ids = (
            values[mask.q_segment_ids],
            values[mask.kv_segment_ids],
        )
        for ids, tokens in ((q_segment_ids, queries), (kv_segment_ids, keys)):
            assert ids.dtype == torch.int32
            assert ids.shape[0] in (1, batch) and ids.shape[1:] == (tokens,)
        assert (q_segment_ids >= 0).all()
        seen = seen & (
            q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]
        )
    return seen
