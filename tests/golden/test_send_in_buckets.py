"""Graphs before and after `send_in_buckets`, and twins that stay as they are."""

import torch
from torch._inductor.fx_passes import bucketing
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.compile.compile_local import _Buckets
from cpcompile.passes.graph.subgraph_calls import call_subgraph
from cpcompile.passes.local.send_in_buckets import send_in_buckets
from tests.golden.golden_text import assert_golden

c10d = torch.ops._c10d_functional


def calls(function, *inputs, megabytes=512e-6, join=None):
    """Products, and what is exchanged, in the order of the graph after the pass.

    join: does the same as the pass, in its place.
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
            lines.append(f"{name[0]} of {numel}")
    return "\n".join(lines)


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


def test_gradients_leave_while_others_are_computed(mesh):
    assert_golden(
        calls(backward(summed), torch.ones(8, 8), *WEIGHTS),
        """\
mm of 64
mm of 64
all_reduce of 128
mm of 64
mm of 64
all_reduce of 128
mm of 64
all_reduce of 64
wait_tensor of 128
wait_tensor of 128
wait_tensor of 64""",
    )


def test_torchs_own_buckets_wait_for_the_last_gradient(mesh):
    """If this fails, torch's pass may do, see docs/internals/torch_has.md."""
    assert_golden(
        calls(
            backward(summed),
            torch.ones(8, 8),
            *WEIGHTS,
            join=bucketing.bucket_all_reduce,
        ),
        """\
mm of 64
mm of 64
mm of 64
mm of 64
mm of 64
all_reduce of 128
wait_tensor of 128
all_reduce of 128
wait_tensor of 128
all_reduce of 64
wait_tensor of 64""",
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
    found = [target for target in targets if target.startswith(names)]
    assert_golden(
        "\n".join(found),
        """\
invoke_subgraph
invoke_subgraph
cp.gradient_bucket.default
_c10d_functional.all_reduce_.default
invoke_subgraph
aten.mm.default
cp.gradient_bucket.default
_c10d_functional.all_reduce_.default
aten.mm.default
_c10d_functional.all_reduce.default""",
    )


def test_gradients_of_one_bucket_leave_at_the_end(mesh):
    found = calls(backward(summed), torch.ones(8, 8), *WEIGHTS, megabytes=25.0)
    assert_golden(
        found,
        """\
mm of 64
mm of 64
mm of 64
mm of 64
mm of 64
all_reduce of 320
wait_tensor of 320""",
    )


def test_a_gradient_as_large_as_a_bucket_travels_alone(mesh):
    def run(x, first, wide, last):
        found = []
        for weight in (first, wide, last):
            x = x @ weight
            found.append(x)
        return [summed(x) for x in found]

    weights = [torch.ones(8, 8), torch.ones(8, 16), torch.ones(16, 8)]
    assert_golden(
        calls(run, torch.ones(8, 8), *weights),
        """\
mm of 64
mm of 64
all_reduce of 128
mm of 128
all_reduce of 128
wait_tensor of 128
wait_tensor of 128""",
    )


def test_zero_joins_nothing(mesh):
    found = calls(backward(summed), torch.ones(8, 8), *WEIGHTS, megabytes=0.0)
    assert_golden(
        found,
        """\
mm of 64
all_reduce of 64
mm of 64
all_reduce of 64
mm of 64
all_reduce of 64
mm of 64
all_reduce of 64
mm of 64
all_reduce of 64
wait_tensor of 64
wait_tensor of 64
wait_tensor of 64
wait_tensor of 64
wait_tensor of 64""",
    )


def test_two_scattered_buckets_are_on_their_way(mesh):
    found = calls(backward(scattered), torch.ones(8, 8), *WEIGHTS, megabytes=256e-6)
    assert_golden(
        found,
        """\
mm of 64
reduce_scatter_tensor of 64
mm of 64
reduce_scatter_tensor of 64
mm of 64
wait_tensor of 8
reduce_scatter_tensor of 64
mm of 64
wait_tensor of 8
reduce_scatter_tensor of 64
mm of 64
reduce_scatter_tensor of 64
wait_tensor of 8
wait_tensor of 8
wait_tensor of 8""",
    )


def test_parameters_are_gathered_two_buckets_ahead(mesh):
    def forward(x, *shards):
        for shard in shards:
            x = x @ gathered(shard)
        return x

    shards = [torch.ones(1, 8) for _ in range(6)]
    found = calls(forward, torch.ones(8, 8), *shards, megabytes=512e-6)
    assert_golden(
        found,
        """\
all_gather_into_tensor_out of 16
all_gather_into_tensor_out of 16
all_gather_into_tensor_out of 16
wait_tensor of 128
mm of 64
mm of 64
wait_tensor of 128
mm of 64
mm of 64
wait_tensor of 128
mm of 64
mm of 64""",
    )


def test_a_sum_that_is_computed_with_stays(mesh):
    def run(x, weight):
        return summed(x @ weight) @ weight

    assert_golden(
        calls(run, torch.ones(8, 8), torch.ones(8, 8)),
        """\
mm of 64
all_reduce of 64
wait_tensor of 64
mm of 64""",
    )


def test_a_gather_of_what_is_computed_stays(mesh):
    def run(x, weight):
        y = x @ weight
        z = x @ x.T
        return gathered(y) @ y.T, z

    assert_golden(
        calls(run, torch.ones(4, 8), torch.ones(8, 8)),
        """\
mm of 32
mm of 32
all_gather_into_tensor of 32
wait_tensor of 256
mm of 256""",
    )


def test_casts_and_factors_of_gradients_come_with_them(mesh):
    def run(x, first, second):
        y = x @ first
        return summed(y).to(torch.bfloat16) * 2, summed(y @ second) / 3

    assert_golden(
        calls(run, torch.ones(8, 8), *WEIGHTS[:2], megabytes=0.0),
        """\
mm of 64
all_reduce of 64
mm of 64
all_reduce of 64
wait_tensor of 64
wait_tensor of 64""",
    )


def test_padding_that_one_rank_has_changes_no_order(mesh):
    def forward(pad):
        def run(x, *shards):
            for shard in shards:
                x = summed(x @ gathered(pad(shard))) @ x
            return x

        return run

    def padded(shard):
        return torch.nn.functional.pad(shard, (0, 0, 0, 1))

    x, wanted = torch.ones(8, 8), torch.ones(2, 8)
    even = [wanted for _ in range(4)]
    last = [torch.ones(1, 8) for _ in range(4)]
    same = [calls(forward(lambda s: s), x[:, :8].repeat(1, 2), *even, megabytes=0.0)]
    same.append(calls(forward(padded), x[:, :8].repeat(1, 2), *last, megabytes=0.0))
    assert same[0] == same[1]
    assert same[0].startswith("all_gather_into_tensor of 16\n" * 3)


def test_a_program_with_gathers_is_of_one_rank(mesh):
    """Where its rank's part lies in a bucket is a number in the program."""
    assert _Buckets(True, None).key()[1] == torch.distributed.get_rank() == 1
    assert _Buckets(False, None).key()[1] is None
