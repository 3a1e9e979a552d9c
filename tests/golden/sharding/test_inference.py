"""Which inputs carry the sequence, where nobody says so; sizes must not matter."""

import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from cpcompile.accounting.graph_account import Purpose
from cpcompile.errors import InputError
from tests.golden.capture import capture, localised, warnings
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend, heads, sdpa
from tests.support.forms.normalised_forms import Patches, Rows


def inferred(fn, *args, mesh, **options):
    """Name and dimension of the inputs that are inferred."""
    captured = capture(fn, *args, mesh=mesh, **options)
    assert captured.error is None, captured.error
    given = captured.ctx.inputs.values()
    return {x.name: x.dim for x in given if x.inferred}


class Decoder(nn.Module):
    def __init__(self, vocabulary=50, width=32, count=4, context=64):
        super().__init__()
        self.count = count
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.linear = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        x = x + attend(self.linear(x), self.count)
        return x + attend(self.linear(x), self.count)

    def forward(self, tokens, labels):
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


EQUAL = {
    "nothing": ((2, 16), {}),
    "batch": ((16, 16), {}),
    "width": ((2, 32), {}),
    "heads": ((2, 16), {"count": 16}),
    "head_dim": ((2, 8), {}),
    "vocabulary": ((2, 50), {}),
    "context": ((2, 64), {}),
    "everything": ((16, 16), {"vocabulary": 16, "width": 16, "count": 16}),
    "odd": ((3, 17), {}),
}


def values_sent(found):
    """What ranks exchange beside attention, gradients and results."""
    return found.report.account.exchanges(Purpose.VALUE)


@pytest.mark.parametrize("equal", EQUAL)
def test_a_decoder_whatever_is_as_long_as_its_sequence(mesh, equal):
    """Labels are whole outside, and each rank reads its part of them."""
    shape, sizes = EQUAL[equal]
    tokens = torch.randint(16, shape)
    found = localised(Decoder(**sizes), tokens, tokens.clone(), mesh=mesh)
    assert list(map(str, found.report.inputs)) == ["tokens dim 1 (inferred)"]
    assert found.report.began == ()
    # Heads that are as many as tokens are taken for them in one backward.
    is_mistaken = equal in ("heads", "everything")
    assert len(values_sent(found)) <= 2 * is_mistaken


def test_it_is_what_a_good_annotation_gives(mesh):
    tokens = torch.randint(50, (2, 17))
    model = Decoder()
    given = {"tokens": 1}
    annotated = localised(model, tokens, tokens.clone(), mesh=mesh, shard=given)
    plain = localised(model, tokens, tokens.clone(), mesh=mesh)
    assert plain.text == annotated.text


def test_shifted_labels(mesh):
    class Shifted(Decoder):
        def forward(self, input_ids, labels):
            logits = self.head(self.hidden(input_ids))
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
            return F.cross_entropy(logits.view(-1, 50), labels.reshape(-1))

    ids = torch.randint(50, (2, 16))
    assert not values_sent(localised(Shifted(), ids, ids.clone(), mesh=mesh))


TABLE = nn.Embedding(50, 32)
SQUARE, IDS = torch.randn(16, 16, 16), torch.randint(50, (2, 16))


def translated(source, target):
    k = heads(attend(TABLE(source)))
    return sdpa(heads(TABLE(target)), k, k)


def modulated(x, condition, scale, row):
    """A condition per sample, as wide as the sequence is long; tables of one row."""
    x = x * (1 + scale[:, None]) + condition[:, None] + row
    return attend(x)


def rotated(x, cos, sin):
    """Tables of positions that are arguments."""
    q = heads(x, 2)
    q = q * cos + q.roll(1, -1) * sin
    return sdpa(q, q, heads(x, 2))


def extended(ids):
    begin = ids.new_zeros(ids.shape[0], 1)
    return attend(TABLE(torch.cat([begin, ids[:, :-1]], 1)))


def written(ids):
    begun = torch.zeros(ids.shape, dtype=torch.long)
    begun[:, 1:] = ids[:, :-1]
    return attend(TABLE(begun))


class Convolved(nn.Module):
    """No attention: rows of images, or samples of sounds, are what is shared out."""

    def __init__(self, dims, count):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        layers = [
            (conv(3 if n == 0 else 8, 8, 3, 2, 1), norm(8), nn.ReLU())
            for n in range(count)
        ]
        self.layers = nn.Sequential(*itertools.chain(*layers))

    def forward(self, x):
        return self.layers(x).flatten(2).mean(-1)


def encoder_layer(**how):
    """Tokens of torch's modules come first, [S, B, C], unless batch_first is set."""
    return nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, **how)


IMAGE, TOKENS = torch.randn(2, 3, 16, 32), torch.randn(16, 16, 32)
CUBE, ROTATION = torch.randn(8, 8, 8, 8), torch.randn(32, 32)
INFERRED = {
    # Batch, heads, tokens and head dimension are all 8; only the place counts.
    "all sizes equal": (
        lambda q, k, v: sdpa(q, k, v),
        (CUBE, CUBE + 1, CUBE + 2),
        {"q": 2, "k": 2, "v": 2},
    ),
    # The same sizes, and the sequence in another place each time.
    "square": (attend, (SQUARE,), {"x": 1}),
    "channels first": (lambda x: attend(x.transpose(1, 2)), (SQUARE,), {"x": 2}),
    "sequence first": (lambda x: attend(x.transpose(0, 1)), (SQUARE,), {"x": 0}),
    "sequence last": (lambda x: attend(x.permute(1, 2, 0)), (SQUARE,), {"x": 2}),
    "two sequences": (translated, (IDS, IDS.flip(1)), {"source": 1, "target": 1}),
    "only looks like one": (
        modulated,
        (torch.randn(2, 32, 32), *torch.randn(2, 2, 32), torch.randn(1, 1, 32)),
        {"x": 1},
    ),
    "positions": (
        rotated,
        (torch.randn(2, 32, 64), ROTATION, ROTATION + 1),
        {"x": 1, "cos": 0, "sin": 0},
    ),
    # Attention over one token has nothing to share out.
    "one token": (attend, (torch.randn(2, 1, 32),), {}),
    "flat ids": (
        lambda ids: attend(TABLE(ids.reshape(-1)).view(*ids.shape, 32)),
        (IDS,),
        {"ids": 1},
    ),
    "extended ids": (extended, (IDS,), {"ids": 1}),
    "written ids": (written, (IDS,), {"ids": 1}),
    "no attention": (lambda x: x.relu(), (torch.randn(2, 16, 8),), {}),
    "rows of images": (Rows(), (torch.randn(2, 3, 40, 12),), {"x": 2}),
    "one convolution": (Patches(), (torch.randn(2, 3, 40, 12),), {}),
    "a sound": (Convolved(1, 2), (torch.randn(2, 3, 32),), {"x": 2}),
    "an image": (Convolved(2, 2), (IMAGE,), {"x": 2}),
    "a video": (Convolved(3, 2), (torch.randn(2, 3, 8, 16, 32),), {"x": 3}),
    "a net of one convolution": (Convolved(2, 1), (IMAGE,), {}),
    "batch first": (encoder_layer(batch_first=True), (TOKENS,), {"src": 1}),
    "tokens first": (encoder_layer(), (TOKENS,), {"src": 0}),
}


@pytest.mark.parametrize("name", INFERRED)
def test_what_is_inferred(mesh, name):
    fn, args, dims = INFERRED[name]
    assert inferred(fn, *args, mesh=mesh) == dims


def test_an_image_is_cut_where_tokens_begin(mesh, caplog):
    conv = nn.Conv2d(3, 32, 4, 4)

    def patches(image):
        return attend(conv(image).flatten(2).transpose(1, 2)).relu()

    found = localised(patches, torch.randn(2, 3, 24, 24), mesh=mesh)
    assert found.report.inputs == ()
    assert found.report.began == ("<top level> flatten [2, 32, 36]",)
    whole, cut, *_ = found.lines("aten.convolution(", "aten.split").splitlines()
    assert "= aten.convolution(primals_3, " in whole
    assert cut.endswith("split_size=5, dim=2)")
    assert not warnings(caplog)


def axial(video):
    """[B, T, S, C]: attention over S, and then over T."""
    b, t, s, c = video.shape
    x = attend(video.reshape(b * t, s, c)).view(b, t, s, c)
    y = x.transpose(1, 2).reshape(b * s, t, c)
    return attend(y)


def test_two_readings_are_refused(mesh):
    with pytest.raises(InputError) as error:
        capture(axial, torch.randn(2, 16, 32, 32), mesh=mesh)
    assert_golden(
        str(error.value),
        """\
the attention calls of axial read different dimensions of one input as their sequence
    (video: dim 1, dim 2); needed one per input, because only one can be shared out: say
    which, by options={"mesh": mesh, "shard": {"video": 1}} or options={"mesh": mesh,
    "shard": {"video": 2}}""",
    )


def test_the_reading_that_another_input_joins_is_meant(mesh):
    """Prompts [B, tokens, layers, D] attend to layers before tokens join an image's."""

    def joined(image, text):
        b, t, n, d = text.shape
        of_layers = attend(text.reshape(b * t, n, d)).view(b, t, n, d)
        return attend(torch.cat([of_layers.mean(2), image], 1))

    image, text = torch.randn(2, 32, 32), torch.randn(2, 16, 4, 32)
    assert inferred(joined, image, text, mesh=mesh) == {"image": 1, "text": 1}


@pytest.mark.parametrize("dim", [1, 2])
def test_either_reading_may_be_chosen(mesh, caplog, dim):
    """Where pixels are cut, attention over frames is in whole windows of a rank."""
    video = torch.randn(2, 16, 32, 32)
    found = localised(axial, video, mesh=mesh, shard={"video": dim})
    forms = [call.form for call in found.report.calls]
    assert forms == ["latents", "latents" if dim == 1 else "windows"]
    assert dim == 1 or not values_sent(found)
    assert not warnings(caplog)


def test_named_inputs_are_the_users_choice(mesh):
    q = torch.randn(2, 4, 16, 8)
    attention = lambda q, k, v: sdpa(q, k, v)  # noqa: E731
    captured = capture(attention, q, q + 1, q + 2, mesh=mesh, shard={"q": 2})
    given = {x.name: x.inferred for x in captured.ctx.inputs.values() if x.dim}
    assert given == {"q": False}


def test_distributed_inputs_say_it_themselves(mesh):
    tokens = cp.shard(torch.randint(50, (2, 16)), mesh, 1)
    captured = capture(Decoder(), tokens, torch.randint(50, (2, 16)), mesh=mesh)
    assert not any(x.inferred for x in captured.ctx.inputs.values())
