"""A million tokens on 64 ranks: no rank makes anything of all of them, but ids.

What has the length of the whole sequence on a rank is one number for each token, as
ids, labels and positions are, or a learned parameter by position. All of it is there
once, however many layers there are, and nothing is of all tokens times anything.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.fx as fx
import transformers
from torch import Tensor

from cpcompile import config
from cpcompile.compile import inner_compilers
from cpcompile.passes.joint.tiling.tile_tokens import tile_tokens
from cpcompile.torch_patches import dead_collectives
from tests.golden.capture import fake_mesh
from tests.models.families.small_gpt import SmallGPT
from tests.models.torchvision_schemas import define_schemas

define_schemas()  # before models of transformers are imported
RANKS = 64
S = 2**20 - 3 * RANKS  # the 16,381 tokens of a rank are a prime


class _Compiled(BaseException):
    """Ends a compilation: nothing runs."""


def gpt(layers):
    model = SmallGPT(vocabulary=512, width=32, heads=2, layers=layers, context=S)
    return model, "tokens"


def llama(layers):
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    more = {"num_hidden_layers": layers, "max_position_embeddings": S}
    config = transformers.LlamaConfig(**sizes, **heads, **more)
    return transformers.LlamaForCausalLM(config), "input_ids"


def graphs(make, layers, **options):
    """Forward and backward of a training step of one rank."""
    found = []
    real = inner_compilers._aot_eager

    def compiled(*args):
        with dead_collectives.partitions() as parts:
            real(*args)
        found.extend(parts)
        raise _Compiled

    with fake_mesh(RANKS) as mesh:
        model, name = make(layers)
        ids = torch.zeros(1, S, dtype=torch.long)
        given = {"mesh": mesh, "inner": "aot_eager"}
        step = torch.compile(model, backend="cp", options=given | options)
        watched = mock.patch.object(inner_compilers, "_aot_eager", compiled)
        with watched, config.patch(outputs=["loss"]), pytest.raises(_Compiled):
            step(**{name: ids, "labels": ids})
    ((forward, backward),) = found
    return forward, backward


def values(module):
    """Every tensor of a graph and of those of its tiles, with the call."""
    for each in module.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            value = node.meta.get("val")
            for x in value if isinstance(value, tuple | list) else (value,):
                if isinstance(x, Tensor):
                    yield node, x


def is_whole(x):
    """Of all tokens, or of pairs of those of ranks."""
    return (
        any(n >= S // 2 for n in x.shape) or sum(n >= S // RANKS for n in x.shape) > 1
    )


CASES = [(gpt, "plain"), (gpt, "tiled"), (llama, "plain"), (llama, "budget")]
FORMS = {"plain": {}, "tiled": {"tile": 1024}, "budget": {"activation_memory": 0.5}}


@pytest.mark.parametrize(("make", "form"), CASES)
def test_nothing_is_of_the_whole_sequence(make, form):
    counts = []
    for layers in (1, 2):
        count = Counter()
        for module in graphs(make, layers, **FORMS[form]):
            for node, x in values(module):
                if not is_whole(x):
                    continue
                count[str(node.target)] += 1
                if x.numel() > S + 1:  # the learned positions, and their gradient
                    assert make is gpt and x.shape == (S, 32), (node, x.shape)
        counts.append(count)
    one, two = counts
    assert one.total() == two.total() > 0, (one, two)


def test_the_check_finds_a_table(monkeypatch):
    """Without the pass the angles of rotary embeddings are of all tokens."""
    monkeypatch.setattr(inner_compilers, "JOINT", (tile_tokens,))
    forward, _ = graphs(llama, 1)
    assert [x for _, x in values(forward) if is_whole(x) and x.numel() > S + 1]
