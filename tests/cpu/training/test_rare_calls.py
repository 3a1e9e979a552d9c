"""Rare calls, and rare values of common ones, as users' programs have them."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.small_calls import SmallCall, check_calls

NAN, INF = float("nan"), float("inf")


EXTREMES = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "amax of all": lambda x: x.abs().amax(),
    "max": lambda x: x.max(),
    "max of dim": lambda x: x.max(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, INF, dim=1),
    "read again": lambda x: x - x.amax(1, keepdim=True),
    "scattered": lambda x: x.amax(0).expand(4, -1, -1).contiguous().sum(0),
}
# NaN as a token of the first rank, of the last, of both; infinities stay.
PLACES = ({2: NAN}, {20: NAN}, {2: NAN, 20: NAN}, {2: INF, 20: -INF})
NOT_FINITE = {
    f"{name} {sorted(changed)} {[*changed.values()]}": SmallCall(call, changed=changed)
    for name, call in EXTREMES.items()
    for changed in PLACES
}
SMALLER = {
    f"amax of {dtype}": SmallCall(lambda x: x.amax(1), changed={40: NAN}, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}

LAZY = {
    "conj of a sum": lambda x: torch.view_as_complex(x).sum(1).conj(),
    "negative bit": lambda x: torch.view_as_complex(x).sum(1).conj().imag,
    "ihfft": lambda x: torch.fft.ihfft(x[..., 0], dim=1),
    # Their backwards fail in torch alone.
    "conj of tokens": lambda x: torch.view_as_complex(x.detach()).conj(),
    "conj, shifted": lambda x: torch.view_as_complex(x.detach()).conj()[:, 1:],
    "conj, picked": lambda x: torch.view_as_complex(x.detach()).conj()[:, -1],
    "imaginary part": lambda x: torch.view_as_complex(x).conj().imag,
    "both": lambda x: torch.view_as_complex(x).sum(1).conj().imag.sum(0, True),
}
LAZY = {k: SmallCall(call, (2, 7, 2)) for k, call in LAZY.items()}
LAZY |= {
    f"{name} of an input of complex numbers": SmallCall(
        call, (2, 7), dtype=torch.complex128
    )
    for name, call in {
        "conj": lambda x: x.conj(),
        "sum": lambda x: x.conj().sum(1),
        "imaginary part": lambda x: x.sum(1).conj().imag,
    }.items()
}

AT = torch.tensor([3, 1, 6, 0, 0, 5, 2])
PICKS = {
    "last of [B, S]": ((2, 7), lambda x: x[:, -1]),
    "select": ((2, 7), lambda x: x.select(-1, 3)),
    "select of channels": ((2, 7, 3), lambda x: x.select(-1, 2)),
    "one number": ((2, 7), lambda x: x[0, -1]),
    "a value head": ((2, 7, 4), lambda x: (x * 2).sum(-1)[:, -1]),
    "by rows": ((2, 7), lambda x: x[torch.arange(2), AT[:2]]),
    "index_select": ((2, 7), lambda x: x.index_select(1, AT[0])),
    "gather": ((7,), lambda x: torch.gather(x, 0, AT[0])),
    "take": ((7,), lambda x: torch.take(x, AT[0])),
    "index_select of a vector": ((7,), lambda x: torch.index_select(x, 0, AT[0])),
    "scatter": ((7,), lambda x: x.scatter(0, AT[0], 1.0)),
    "scatter_add": ((7,), lambda x: x.scatter_add(0, AT[0], x[0])),
    "index_fill": ((7,), lambda x: x.index_fill(0, AT[0], 1.0)),
    "index_copy": ((7,), lambda x: x.index_copy(0, AT[0], x[0])),
}
PICKS["index_fill by a tensor"] = (
    (2, 7),
    lambda x: x.index_fill(1, AT[:2], NUMBER),
)
NUMBER = torch.tensor(2.0, dtype=torch.float64)
NUMBERED = torch.zeros(2, 0, dtype=torch.uint8)
PICKS["gather nothing"] = ((7,), lambda x: torch.gather(x, 0, NUMBERED))
PICKS = {k: SmallCall(f, shape, shape.index(7)) for k, (shape, f) in PICKS.items()}

ZEROS = {
    "copysign": lambda x: torch.copysign(x, x.flip(1)),
    "nextafter": lambda x: torch.nextafter(x, (x * 3).flip(1)),
    "sgn": lambda x: torch.sgn(x),
    "sgn, multiplied": lambda x: torch.sgn(x) * x,
    "copysign of a sum": lambda x: torch.copysign(x, x.sum(1, keepdim=True)),
    "dropout of all": lambda x: F.dropout(x, 1.0),
}

DTYPES = {
    "int16": lambda x: (x * 100).to(torch.int16),
    "uint32": lambda x: (x.abs() * 100).to(torch.uint32),
    "float8": lambda x: x.detach().to(torch.float8_e4m3fn),
    "float8, last": lambda x: x.to(torch.float8_e4m3fn)[:, -1].float(),
    "float8, flipped": lambda x: x.to(torch.float8_e4m3fn).flip(1).float(),
    "float8, shifted": lambda x: x.to(torch.float8_e4m3fn)[:, 1:].float(),
    "bool, last": lambda x: (x > 0.5)[:, -1],
    "int16, last": lambda x: (x * 100).to(torch.int16)[:, -1],
    "int16, largest": lambda x: (x * 100).to(torch.int16).amax(1),
    "int16, added": lambda x: (x * 100).to(torch.int16).sum(1, dtype=torch.int16),
    "int16, transposed": lambda x: (x * 9).to(torch.int16).mT.contiguous().cumsum(-1),
    "int16, sorted": lambda x: (x * 100).to(torch.int16).sort(1)[0],
}

TIES = dict(enumerate([3.0, 1, 3, 0, 3, 2, 1, 0, 3, 3, 1, 2, 2, 3]))
EQUAL = {
    "amax": lambda x: x.amax(1),
    "amax of all": lambda x: x.amax(),
    "max of all": lambda x: x.max(),
    "aminmax": lambda x: torch.aminmax(x),
    "infinity norm of all": lambda x: torch.linalg.vector_norm(x, INF),
    "norm of no dimensions": lambda x: torch.linalg.vector_norm(x, dim=()),
    "sum of no dimensions": lambda x: x.sum(()) + x.mean([]).square(),
    "counted": lambda x: x.count_nonzero(()),
    "median": lambda x: x.median(1)[0] + x.median(),
    "scatter_reduce": lambda x: x.new_zeros(1, 3).scatter_reduce(
        1, torch.arange(14)[None] % 3, x, "amax", include_self=False
    ),
}
EQUAL = {k: SmallCall(f, (1, 14), changed=TIES) for k, f in EQUAL.items()}

EMPTY = {
    "no tokens": lambda x: x.repeat(1, 0, 1),
    "no channels": lambda x: x.repeat(1, 2, 0),
    "no rows": lambda x: x.repeat(0, 1, 1).flatten(0, 1),
    "slices": lambda x: (x[:, :0], x[..., :0], x[:0]),
    "joined": lambda x: torch.cat([x[:, :0], x], 1),
    "sums": lambda x: (x[..., :0].sum(1), x[..., :0].sum(-1)),
    "a product": lambda x: x[..., :0] @ x.new_ones(0, 4),
}


def scattered(mask):
    return lambda x: (
        x.masked_scatter(mask, x * 2),
        x.masked_scatter(mask, torch.arange(1.0, 43, dtype=x.dtype)),
    )


BROADCAST = {
    f"masked_scatter by {list(shape)}": SmallCall(scattered(torch.ones(shape) > 0))
    for shape in ((), (1,), (1, 1), (1, 1, 1), (2, 1, 1), (7, 1), (3,), (2, 7, 3))
}


BROADCAST |= {
    f"masked_scatter of complex numbers, {name}": SmallCall(
        lambda x, mask=mask: x.masked_scatter(mask(x), x * 2), dtype=torch.complex128
    )
    for name, mask in {
        "by tokens": lambda x: torch.ones(2, 7, 1) > 0,
        "by entries": lambda x: x.real.detach() > 0,
    }.items()
}
# Equally many samples, tokens and channels: which dimension a mask has is its place.
BROADCAST |= {
    f"masked_scatter of a cube by {list(shape)}, {dim}": SmallCall(
        lambda x, shape=shape: x.masked_scatter(torch.arange(5).view(shape) > 2, x * 2),
        (5, 5, 5)[: max(2, len(shape))],
        dim,
    )
    for shape in ((5,), (5, 1), (1, 5), (5, 1, 1), (1, 5, 1))
    for dim in (0, 1)
}
PADDED = {
    f"{mode} {pad}": SmallCall(lambda x, pad=pad, mode=mode: F.pad(x.mT, pad, mode))
    for mode in ("circular", "reflect", "replicate", "constant")
    for pad in ((-1, 1), (2, -1), (1, 2))
}


def cosines(x):
    """The features are cut: a cosine is a sum over the ranks, and 1 - cosine is not."""
    target = torch.tensor([1.0, -1, 1], dtype=x.dtype)
    first, second = x[0].T.contiguous(), x[1].T.contiguous()
    return F.cosine_embedding_loss(first, second, target)


SUMS = {
    "cosines": cosines,
    "filled": lambda x: x + x.sum(1, keepdim=True).fill_(1),
    "reversed": lambda x: torch.ops.aten.rsub.Scalar(x.sum(1), 1),
    "one more": lambda x: 1 - x.sum(1) + torch.lerp(x.sum(1), x.sum(1) + 1, 0.3),
    "written": lambda x: x.sum(1).index_fill(0, torch.tensor([1]), 3.0),
}

KINDS = {
    "broadcast": BROADCAST,
    "padded": PADDED,
    "sums": SUMS,
    "empty": EMPTY,
    "equal": EQUAL,
    "not finite": NOT_FINITE,
    "smaller": SMALLER,
    "lazy": LAZY,
    "picks": PICKS,
    "zeros": ZEROS,
    "dtypes": DTYPES,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inner", "world"), [("aot_eager", 2), ("aot_eager", 3), ("inductor", 2)]
)
@on_ranks("world", timeout=590)
def test_they_equal_one_process(inner, world, kind):
    calls = KINDS[kind].items()
    cases = {k: x if isinstance(x, SmallCall) else SmallCall(x) for k, x in calls}
    check_calls(cases, world, inner)


@on_ranks(2)
def test_embeddings_with_other_gradients():
    found = [
        _embedded({"max_norm": 1.0}),
        _embedded({"max_norm": 0.5, "norm_type": 1.0, "scale_grad_by_freq": True}),
        _embedded({"scale_grad_by_freq": True, "padding_idx": 3}),
        _embedded({"max_norm": 1.0}, frozen=True),
        _embedded({"sparse": True}, frozen=True),
        _embedded({"sparse": True}),  # dense, as AOTAutograd traces it
    ]
    assert found == ["equal"] * 6


def _embedded(arguments, frozen=False):
    torch.manual_seed(0)
    ids = torch.arange(16)[None] % 7
    alone, sharded = (
        nn.Embedding(32, 16, dtype=torch.float64, **arguments) for _ in range(2)
    )
    sharded.load_state_dict(alone.state_dict())
    scale = torch.ones(16, dtype=torch.float64, requires_grad=True)
    for table in (alone, sharded):
        table.requires_grad_(not frozen)

    def forward(table, ids):
        q = (table(ids) * scale)[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    options = {"mesh": sequence_mesh(2), "inner": "aot_eager", "shard": {"ids": 1}}
    losses = []
    for table, backend in ((alone, {"backend": "aot_eager"}), (sharded, None)):
        torch._dynamo.reset()
        backend = backend or {"backend": "cp", "options": options}
        losses.append(torch.compile(forward, **backend)(table, ids))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(alone.weight, sharded.weight)
    if not frozen:
        torch.testing.assert_close(alone.weight.grad, sharded.weight.grad)
    return "equal"
