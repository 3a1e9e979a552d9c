"""Graphs before and after `send_in_buckets`, and twins that stay as they are."""

import itertools

import torch
from torch._inductor.fx_passes import bucketing
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.compile.compile_local import _Buckets
from cpcompile.passes.graph.subgraph_calls import call_subgraph
from cpcompile.passes.local.send_in_buckets import send_in_buckets
from tests.golden.golden_text import assert_golden, table

c10d = torch.ops._c10d_functional
NAMES = {
    "wait_tensor": "wait",
    "reduce_scatter_tensor": "scatter",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather out",
}


def calls(function, *inputs, megabytes=512e-6, join=None):
    """Products, and what is exchanged, in the order of the graph after the pass.

    Equal ones in a row are counted. join: does the same as the pass, in its place.
    """
    module = make_fx(function, tracing_mode="fake")(*inputs)
    if join is None:
        send_in_buckets(module.graph, megabytes)
    else:
        join(module, lambda number: megabytes)
    module.graph.lint()
    lines = []
    for node in module.graph.nodes:
        name = str(node.target).split(".")[1:2]
        if name == ["mm"] or "_c10d_functional" in str(node.target):
            numel = node.all_input_nodes[0].meta["val"].numel()
            lines.append(f"{NAMES.get(name[0], name[0])}({numel})")
    runs = ((line, len(list(run))) for line, run in itertools.groupby(lines))
    return ", ".join(line if n == 1 else f"{n} x {line}" for line, n in runs)


def group():
    return torch.distributed.group.WORLD.group_name


def summed(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group()))


def scattered(x):
    wait = c10d.reduce_scatter_tensor(x, "sum", 8, group())
    return c10d.wait_tensor(wait)


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, group()))


WEIGHTS = [torch.ones(8, 8) for _ in range(5)]


def backward(reduce):
    """Five gradients, each from the one before, summed at the end of the graph."""

    def run(x, *weights):
        found = []
        for weight in weights:
            x = x @ weight
            found.append(x)
        return [reduce(x) for x in found]

    return run


def through_a_wide_layer(x, first, wide, last):
    """A gradient as large as a bucket travels alone."""
    found = []
    for weight in (first, wide, last):
        x = x @ weight
        found.append(x)
    return [summed(x) for x in found]


def forward(x, *shards):
    for shard in shards:
        x = x @ gathered(shard)
    return x


def computed_with(x, weight):
    """A sum, which stays."""
    return summed(x @ weight) @ weight


def gathered_result(x, weight):
    """A gather of what is computed, which stays."""
    y = x @ weight
    z = x @ x.T
    return gathered(y) @ y.T, z


def cast_and_scaled(x, first, second):
    """Casts and factors of gradients come with them."""
    y = x @ first
    return summed(y).to(torch.bfloat16) * 2, summed(y @ second) / 3


X = torch.ones(8, 8)
WIDE = (torch.ones(8, 8), torch.ones(8, 16), torch.ones(16, 8))
SHARDS = [torch.ones(1, 8) for _ in range(6)]
PROGRAMS = {
    "while others are computed": (backward(summed), (X, *WEIGHTS), {}),
    # If this one changes, torch's pass may do, see docs/internals/torch_has.md.
    "torch's own buckets": (
        backward(summed),
        (X, *WEIGHTS),
        {"join": bucketing.bucket_all_reduce},
    ),
    "one bucket": (backward(summed), (X, *WEIGHTS), {"megabytes": 25.0}),
    "a large gradient": (through_a_wide_layer, (X, *WIDE), {}),
    "zero joins nothing": (backward(summed), (X, *WEIGHTS), {"megabytes": 0.0}),
    "two on their way": (backward(scattered), (X, *WEIGHTS), {"megabytes": 256e-6}),
    "two buckets ahead": (forward, (X, *SHARDS), {}),
    "computed with": (computed_with, (X, WEIGHTS[0]), {}),
    "gathered result": (gathered_result, (torch.ones(4, 8), WEIGHTS[0]), {}),
    "cast and scaled": (cast_and_scaled, (X, *WEIGHTS[:2]), {"megabytes": 0.0}),
}


def test_the_order_of_calls(mesh):
    """Gradients leave while others are computed, and torch's own wait for the last."""
    texts = {
        name: calls(fn, *inputs, **options)
        for name, (fn, inputs, options) in PROGRAMS.items()
    }
    assert_golden(
        table(texts),
        """\
while others are computed: 2 x mm(64), all_reduce(128), 2 x mm(64), all_reduce(128),
    mm(64), all_reduce(64), 2 x wait(128), wait(64)
torch's own buckets: 5 x mm(64), all_reduce(128), wait(128), all_reduce(128), wait(128),
    all_reduce(64), wait(64)
one bucket: 5 x mm(64), all_reduce(320), wait(320)
a large gradient: 2 x mm(64), all_reduce(128), mm(128), all_reduce(128), 2 x wait(128)
zero joins nothing: mm(64), all_reduce(64), mm(64), all_reduce(64), mm(64),
    all_reduce(64), mm(64), all_reduce(64), mm(64), all_reduce(64), 5 x wait(64)
two on their way: mm(64), scatter(64), mm(64), scatter(64), mm(64), wait(8),
    scatter(64), mm(64), wait(8), scatter(64), mm(64), scatter(64), 3 x wait(8)
two buckets ahead: 3 x gather out(16), wait(128), 2 x mm(64), wait(128), 2 x mm(64),
    wait(128), 2 x mm(64)
computed with: mm(64), all_reduce(64), wait(64), mm(64)
gathered result: 2 x mm(32), gather(32), wait(256), mm(256)
cast and scaled: mm(64), all_reduce(64), mm(64), all_reduce(64), 2 x wait(64)""",
    )


def test_gradients_of_a_function_are_joined_in_one_call(mesh):
    module = make_fx(backward(summed), tracing_mode="fake")(torch.ones(8, 8), *WEIGHTS)
    products = module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.mm.default
    )
    operands = [x.meta["val"] for x in products[0].args]
    module.body = make_fx(lambda x, w: (x @ w,), tracing_mode="fake")(*operands)
    with module.graph.inserting_before(products[0]):
        function = module.graph.get_attr("body")
    for product in products[:3]:
        with module.graph.inserting_before(product):
            (made,) = call_subgraph(function, product.args, {})
        product.replace_all_uses_with(made)
        module.graph.erase_node(product)
    send_in_buckets(module.graph, 512e-6)
    module.graph.lint()
    names = ("invoke_subgraph", "aten.mm", "aten.cat", "cp.", "_c10d_functional.all")
    targets = [str(node.target) for node in module.graph.nodes]
    found = [
        target.split(".")[-2:][0] for target in targets if target.startswith(names)
    ]
    assert found == [
        *("invoke_subgraph", "invoke_subgraph", "gradient_bucket", "all_reduce_"),
        *("invoke_subgraph", "mm", "gradient_bucket", "all_reduce_"),
        *("mm", "all_reduce"),
    ]


def test_padding_that_one_rank_has_changes_no_order(mesh):
    def padded_forward(pad):
        def run(x, *shards):
            for shard in shards:
                x = summed(x @ gathered(pad(shard))) @ x
            return x

        return run

    def padded(shard):
        return torch.nn.functional.pad(shard, (0, 0, 0, 1))

    x = torch.ones(8, 16)
    even, last = ([torch.ones(n, 8)] * 4 for n in (2, 1))
    one = calls(padded_forward(lambda s: s), x, *even, megabytes=0.0)
    assert one == calls(padded_forward(padded), x, *last, megabytes=0.0)
    assert one.startswith("3 x gather(16), ")


def test_a_program_with_gathers_is_of_one_rank(mesh):
    """Where its rank's part lies in a bucket is a number in the program."""
    assert _Buckets(True, None).key()[1] == torch.distributed.get_rank() == 1
    assert _Buckets(False, None).key()[1] is None
