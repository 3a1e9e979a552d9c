"""Inductor adds up the gradient of a weight over tiles in one place of memory."""

import re

import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from cpcompile.passes.joint.tiling.tile_tokens import Tiling, tile_tokens
from cpcompile.torch_patches import inductor_lowerings
from tests.support.bounds import check, deviations
from tests.support.forms.tiled_forms import WIDTH, WORDS, example, plain

TILES = 4
TABLE = f"empty_strided_cpu(({WORDS}, {WIDTH}), ({WIDTH}, 1)"


def codes():
    """Gradients of the head, without tiles and with, and the modules that are made."""
    model, x, labels = example()
    model.loss = plain

    def step(call):
        loss = call(x[:1], labels[:1])
        return {"head": torch.autograd.grad(3 * loss, model.head.weight)[0]}

    def run(graph):
        names = graph.find_nodes(op="placeholder")
        numbers = [int(n.name.split("_")[1]) - 1 for n in names if is_fixed(n)]
        tiling = Tiling(48, 2**16, 2**14, False, frozenset(numbers))
        tile_tokens(graph, tiling)  # the graph of a tile too, which stays

    def is_fixed(node):  # labels and x are neither
        value = node.meta["val"]
        return node.name.startswith("primals") and 192 not in value.shape

    settings = {"joint_custom_pre_pass": run, "fx_graph_cache": False}
    torch._dynamo.reset()
    with inductor_config.patch(settings):
        got, made = run_and_get_code(lambda: step(torch.compile(model)))
    return got, step(model), made


def test_the_sum_exists_once_and_is_complete_in_the_forward():
    got, wanted, (forward, backward) = codes()
    check(deviations(got, wanted))
    assert forward.count("cp.add_product_.default(") == TILES - 1
    assert forward.count(TABLE) == 1
    assert "add_product_" not in backward


def test_results_of_a_function_are_let_go_where_they_are_read():

    @torch.compiler.nested_compile_region
    def tile(x):
        return x @ x.t(), x * 2

    def tiles(x):
        results = [tile(part) for part in x.chunk(4)]
        return torch.cat([x for x, _ in results]), sum(x.sum() for _, x in results)

    inductor_lowerings.install()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        got, (code,) = run_and_get_code(torch.compile(tiles), x := torch.randn(16, 8))
    torch.testing.assert_close(got, tiles(x))
    reads = re.findall(r"buf\d+ = buf\d+\[\d\]\n(.*)", code)
    assert len(reads) == 8 and all("None, *buf" in x for x in reads)
