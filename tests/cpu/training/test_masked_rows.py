"""Rows that are written where a mask is True, against one process."""

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of

BATCH, WIDTH, HEADS = 2, 8, 2


def attend(x):
    """[B, S, C] -> [B, S, C], causal."""
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def assigned(m, x, rows):
    x[m.mask] = rows
    return x


def one_row(m, x, rows):
    x[m.mask] = rows[0]
    return x


def tokens_of_each(m, x, rows):
    x[:, m.mask[0]] = torch.stack([rows[: m.in_first], rows[: m.in_first].cos()])
    return x


def entries(m, x, rows):
    x[m.entries] = rows.flatten()[: m.all_entries]
    return x


def scattered(m, x, rows):
    """As transformers places features of images, of which there may be more."""
    more = torch.cat([rows, rows.sin()])
    return x.masked_scatter(m.mask.unsqueeze(-1).expand_as(x), more)


def put_and_added(m, x, rows):
    x.index_put_((m.mask,), rows, accumulate=True)
    return x.index_put((m.mask,), rows[0], accumulate=True)


def through_views_of_a_view(m, x, rows):
    """In flattened tokens, as LLaVA's first code did."""
    flat = x.reshape(-1, WIDTH)
    flat[m.mask.reshape(-1)] = rows
    return flat.view(x.shape)


def attended_rows(m, x, rows):
    """The features are a sequence with attention of its own."""
    x[m.mask] = attend(rows[None])[0]
    return x


def in_a_region(m, x, rows):
    def region(x, rows):
        x = x * 1.5
        x[m.mask] = rows.sin()
        return attend(x)

    return checkpoint(region, x, rows, use_reentrant=False)


def constant(m, x, rows):
    x[m.mask] = rows.detach()
    return x * rows.sum()


FORMS = (
    assigned, one_row, tokens_of_each, entries, scattered, put_and_added,
    through_views_of_a_view, attended_rows, in_a_region, constant,
)  # fmt: skip


def added(m, x, rows):
    x[m.mask] += rows
    return x


def deep_stack(m, x, rows):
    """As Qwen3-VL adds features of deeper layers."""
    x = x.clone()
    new = x[m.mask, :] + rows
    x[m.mask, :] = new
    return x


def mapped(m, x, rows):
    x[m.mask] = (x[m.mask] * rows).sin()
    return x


def read(m, x, rows):
    return x * 2, (x[m.mask] * rows).sum(), x[m.mask].square().mean()


def selected(m, x, rows):
    return x * rows.sum(), torch.masked_select(x, m.entries).square().sum()


READS = (added, deep_stack, mapped, read, selected)
SOME_READS = (deep_stack, mapped, selected)


class Rows(nn.Module):
    """What is between two attention calls is one of the forms."""

    def __init__(self, form, seq: int) -> None:
        super().__init__()
        self.form = form
        mask = torch.zeros(BATCH, seq, dtype=torch.bool)
        mask[:, 2:7] = True
        mask[1, -3:] = True
        entries = torch.rand(BATCH, seq, WIDTH) < 0.2
        self.register_buffer("mask", mask)
        self.register_buffer("entries", entries)
        self.in_first, self.all_entries = 5, int(entries.sum())
        self.rows = nn.Parameter(torch.randn(int(mask.sum()), WIDTH))

    def forward(self, x):
        y = self.form(self, attend(x) * 1.0, self.rows)
        first, *others = y if isinstance(y, tuple) else (y,)
        return attend(first), *others


SOME = (assigned, tokens_of_each, scattered, in_a_region)
COMPILED = (assigned, scattered, entries)
SETTINGS = {
    "some": (2, 16, "plain", "zigzag", SOME),
    "zigzag": (2, 16, "plain", "zigzag", FORMS),
    "three ranks": (3, 17, "plain", "contiguous", FORMS),
    "dtensors on three": (3, 17, "dtensor", "contiguous", FORMS),
    "striped": (3, 18, "plain", "striped", FORMS),
    "inductor": (2, 16, "plain", "zigzag", COMPILED),
    "some reads": (2, 16, "plain", "zigzag", SOME_READS),
    "reads": (2, 16, "plain", "zigzag", READS),
    "reads on three": (3, 17, "plain", "contiguous", READS),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(lambda setting: SETTINGS[setting][0])
def test_rows_are_written_by_each_rank(setting):
    """Nothing is gathered but the rows, where they are read or a sharded sequence.

    Rows that are only added to what is there are not read.
    """
    world, seq, door, layout, forms = SETTINGS[setting]
    options = {"layout": layout, "strategy": "ring"}
    options["inner"] = "inductor" if setting == "inductor" else "aot_eager"
    reads = "reads" in setting
    for form in forms:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=reads):
            shape = (BATCH, seq, WIDTH)
            found = compare(lambda f=form: Rows(f, seq), shape, world, door, **options)
        found.check()
        adds = form in (added, deep_stack)
        gathers = reads and not adds
        # A sequence that is not sharded has no layout.
        texts = [x for x in found.warnings if "is not met" not in x]
        assert door == "dtensor" or bool(texts) == gathers, form.__name__


class MaskOfValues(nn.Module):
    """Which rows are written depends on the sharded values themselves."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(40, WIDTH))

    def forward(self, x):
        y = attend(x) * 1.0
        written = y.masked_scatter((x[..., 0] > 0)[..., None], self.rows)
        y[x[..., 1] > 0.5] = 0.25
        return attend(y + written)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_a_mask_of_sharded_values(world, door):
    options = {"strategy": "ring", "layout": "contiguous"}
    compare(MaskOfValues, (BATCH, 15, WIDTH), world, door, **options).check()


@pytest.mark.parametrize("extra", [-1, 1])
@on_ranks(2)
def test_another_number_of_rows_is_an_error_on_every_rank(extra):
    model = Rows(assigned, 16)
    model.rows = nn.Parameter(torch.randn(model.rows.shape[0] + extra, WIDTH))
    compiled = compiled_on(2, model)
    text = message_of(lambda: compiled(torch.randn(BATCH, 16, WIDTH)))
    assert "RuntimeError" in text and "a mask is True at 13 entries, and" in text
    assert "x[m.mask] = rows" in text or "test_masked_rows.py" in text


@on_ranks(2)
def test_without_gradients():
    with torch.no_grad():
        for form in SOME:
            compare(lambda f=form: Rows(f, 16), (BATCH, 16, WIDTH), 2).check()
