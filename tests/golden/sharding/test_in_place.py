"""In-place calls become functional ones, or are refused where others see the memory."""

import operator

import torch
import torch.nn.functional as F

from cpcompile.errors import RewriteError
from tests.golden.capture import capture, inside, sharded, warnings, without_lines
from tests.golden.golden_text import assert_golden, lines_without, table


def add(x):
    return x.relu().add_(1) * 2


def multiply(x):
    return operator.imul(x.relu(), 2)


def activate(x):
    return F.relu(x * 2, inplace=True) + 1


def assign(x):
    """DTensor would lose it; later readers must see what was written."""
    y = x.relu()
    y[:, 0] = 0
    return y * 2


def write_to_an_alias(x):
    """What is written goes to a copy, from which the others are made anew."""
    y = x.relu()
    first = y[:, :4]
    first.add_(1)
    return y * 2


WRITES = (add, multiply, activate, assign, write_to_an_alias)


def test_writes(mesh, caplog):
    captures = {fn.__name__: sharded(fn, mesh) for fn in WRITES}
    assert captures["add"]["shard_graph"].rewrites == 3
    assert captures["write_to_an_alias"]["functionalise_writes"].rewrites == 1
    assert_golden(
        table({name: inside(x) for name, x in captures.items()}),
        """\
add:
  relu = .relu(cp_shard)
  add_ = cp_functional(relu, add_, 1)
  mul = mul(add_, 2)
multiply:
  relu = .relu(cp_shard)
  imul = cp_functional(relu, imul, 2)
activate:
  mul = mul(cp_shard, 2)
  relu = cp_functional(mul, relu, inplace=True)
  add = add(relu, 1)
assign:
  y = .relu(cp_shard)
  cp_move_tokens = cp_move_tokens([y], 1, 'assign', 0, 1, 1, fill=0)
  mul = mul(cp_move_tokens, 2)
write_to_an_alias:
  y = .relu(cp_shard)
  cp_pick_tokens = cp_pick_tokens(y, 1, (:, :4, :))
  clone = clone(cp_pick_tokens)
  add_ = cp_functional(clone, add_, 1)
  cp_move_tokens = cp_move_tokens([y, add_], 1, 'assign', None, 4, None)
  mul = mul(cp_move_tokens, 2)""",
    )
    assert not warnings(caplog)


def test_a_write_into_a_plain_tensor(mesh):
    def fill(x):
        buffer = torch.zeros(2, 16, 8)
        buffer[:] = x.relu()
        return buffer * 2

    assert_golden(
        inside(sharded(fill, mesh)),
        """\
buffer = zeros(2, 16, 8)
relu = .relu(cp_shard)
cp_replicate = cp_replicate(buffer)
cp_replicated = cp_replicated(cp_functional, cp_replicate, setitem, :, relu)
cp_shard_1 = cp_shard(cp_replicated, 1)
mul = mul(cp_shard_1, 2)""",
    )


def test_assignment_to_a_part_of_tokens_and_channels(mesh, caplog):
    def assign(x):
        y = x.relu()
        y[:, 0, :4] = 0
        return y * 2

    captured = sharded(assign, mesh)
    assert "cp_replicated = cp_replicated(cp_functional, y, setitem" in captured.text
    (text,) = warnings(caplog)
    assert_golden(
        without_lines(text),
        """\
setitem at <top level> (LINE) runs on gathered tensors, because DTensor cannot shard it
    here (DTensor has no rule for assignment to a part of a tensor); the result is
    correct, only slower""",
    )


def test_a_write_that_no_other_tensor_reads_later(mesh):
    """The twin of the rewritten one."""

    def aliased(x):
        y = x.relu()
        first = y[:, :4].sum()
        return y.add_(1) * first

    assert "= cp_functional(" in sharded(aliased, mesh).text


def test_a_write_that_every_rank_does_in_its_part(mesh, caplog):
    """As DeepSeek's keys are made; nothing is gathered, and nobody is warned."""

    def joined(x):
        y = x.new_empty(2, 16, 8)
        y[..., :5] = x[..., 3:]
        y[..., 5:].copy_(x[..., :3])
        return F.scaled_dot_product_attention(y, y, y)

    captured = sharded(joined, mesh)
    assert captured["functionalise_writes"].rewrites == 1
    assert_golden(
        lines_without(inside(captured), "squeeze", "ring"),
        """\
y = .new_empty(cp_shard, 2, 16, 8)
getitem = cp_shard[..., 3:]
cp_local_write = cp_local_write(y, getitem, (S(1),), getitem)
getitem_1 = cp_local_write[..., 5:]
getitem_2 = cp_shard[..., :3]
clone = clone(getitem_1)
copy_ = cp_functional(clone, copy_, getitem_2)
cp_local_write_1 = cp_local_write(cp_local_write, copy_, (S(1),), getitem)""",
    )
    assert not warnings(caplog)


def test_a_write_of_plain_into_plain_stays(mesh):
    def shift(x, labels):
        moved = labels.new_zeros(labels.shape)
        moved[:, 1:] = labels[:, :-1]
        return x.relu(), moved

    captured = sharded(shift, mesh, more=(torch.randint(8, (2, 16)),))
    assert "= setitem(moved, " in captured.text
    assert "cp_functional" not in captured.text


def test_a_result_written_to_out_is_copied_there(mesh):
    def doubled(x):
        y = x.relu()
        memory = torch.zeros_like(y)
        with torch.no_grad():
            result = torch.add(y, 1, out=memory)
        return result * 2 + memory

    captured = sharded(doubled, mesh)
    assert_golden(
        inside(captured),
        """\
y = .relu(cp_shard)
memory = zeros_like(y)
_set_grad_enabled = _set_grad_enabled(False)
add_2 = add(y, 1)
copy_ = cp_functional(memory, copy_, add_2)
as_if_written = as_if_written(memory, copy_)
_set_grad_enabled_1 = _set_grad_enabled(True)
mul = mul(as_if_written, 2)
add_1 = add(mul, as_if_written)""",
    )


@torch.library.custom_op("cp_in_place::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes into an argument that is not the first one."""
    out.copy_(x * 3)


@torch.library.custom_op("cp_in_place::count", mutates_args={"x"})
def count(x: torch.Tensor) -> torch.Tensor:
    """Returns something else than what it writes to."""
    x.add_(1)
    return x.sum()


@count.register_fake
def _(x):
    return x.new_empty(())


def to_an_argument(x):
    """The caller would not see it in the full tensor."""
    return x.add_(1) * 2


def to_a_view_of_an_argument(x):
    first = x[:, :4]
    first.add_(1)
    return x * 2


def results(x):
    y = x.relu()
    out = torch.empty(2, 8), torch.empty(2, 8, dtype=torch.long)
    with torch.no_grad():
        return torch.max(y, 1, out=out)


def filled(x):
    y = F.scaled_dot_product_attention(x, x, x)
    out = torch.zeros_like(y)
    fill(y, out)
    return out * 2


def counted(x):
    y = F.scaled_dot_product_attention(x, x, x)
    return count(y) + y.sum()


def packet(x):
    y = F.scaled_dot_product_attention(x, x, x)
    out = torch.zeros_like(y)
    torch.ops.cp_in_place.fill(y, out=out)
    return out * 2


REFUSED = (to_an_argument, to_a_view_of_an_argument, results, filled, counted, packet)


def test_writes_that_would_be_lost_are_refused(mesh):
    texts = {}
    for fn in REFUSED:
        error = capture(fn, torch.randn(2, 16, 8), mesh=mesh, shard={"x": 1}).error
        assert type(error) is RewriteError
        texts[fn.__name__] = without_lines(str(error))
    assert_golden(
        table(texts),
        """\
to_an_argument: add_ at <top level> (LINE) writes into the argument l_x_, and each rank
    has only a part of what is written, so that the caller would not see it; needed a
    call that returns a new tensor, or a clone before it
to_a_view_of_an_argument: add_ at <top level> (LINE) writes into the argument l_x_, and
    each rank has only a part of what is written, so that the caller would not see it;
    needed a call that returns a new tensor, or a clone before it
results: max_1 at <top level> (LINE) writes its result to out=; needed a call that
    returns a new tensor: leave out= away
filled: fill_default at <top level> (LINE) writes into out; needed an operator that
    writes into its first argument alone and returns nothing else, or one that returns
    new tensors: register it with mutates_args=()
counted: count_default at <top level> (LINE) writes into squeeze; needed an operator
    that writes into its first argument alone and returns nothing else, or one that
    returns new tensors: register it with mutates_args=()
packet: fill at <top level> (LINE) writes its result to out=; needed a call that returns
    a new tensor: leave out= away""",
    )
