"""Rows that are written where a mask is True, against one process."""

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.cpu.against_one_process import Comparison, compare
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import deviations

BATCH, WIDTH, HEADS = 2, 8, 2


def attend(x):
    """[B, S, C] -> [B, S, C], causal."""
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def assigned(m, x, rows):
    x[m.mask] = rows
    return x


def colon(m, x, rows):
    x[m.mask, :] = rows.sin()
    return x + x.cos()


def number(m, x, rows):
    x[m.mask] = 0.5
    return x * rows.sum()


def scalar(m, x, rows):
    x[m.mask] = rows[0, 0]
    return x


def one_row(m, x, rows):
    x[m.mask] = rows[0]
    return x


def column(m, x, rows):
    x[m.mask] = rows[:, :1]
    return x


def tokens(m, x, rows):
    x[:, m.mask[0]] = rows[: m.in_first].sin()
    return x


def tokens_of_each(m, x, rows):
    x[:, m.mask[0]] = torch.stack([rows[: m.in_first], rows[: m.in_first].cos()])
    return x


def last_dim(m, x, rows):
    x = x.mT.contiguous()
    x[..., m.mask[0]] = rows[: m.in_first].mT
    return x.mT


def channels(m, x, rows):
    x[m.mask, 2:5] = rows[:, 2:5]
    return x


def one_entry(m, x, rows):
    x[1, m.mask[1]] = rows[m.in_first :]
    return x


def entries(m, x, rows):
    x[m.entries] = rows.flatten()[: m.all_entries]
    return x


def scattered(m, x, rows):
    """As transformers places features of images, of which there may be more."""
    more = torch.cat([rows, rows.sin()])
    return x.masked_scatter(m.mask.unsqueeze(-1).expand_as(x), more)


def scattered_entries(m, x, rows):
    return x.masked_scatter_(m.entries, rows)


def put(m, x, rows):
    return x.index_put((m.mask,), rows)


def put_and_added(m, x, rows):
    x.index_put_((m.mask,), rows, accumulate=True)
    return x.index_put((m.mask,), rows[0], accumulate=True)


def through_a_view(m, x, rows):
    """Written to the first channels, and read through another name."""
    part = x[..., :4]
    part[m.mask] = rows[:, :4]
    return x * 2


def through_views_of_a_view(m, x, rows):
    """In flattened tokens, as LLaVA's first code did."""
    flat = x.reshape(-1, WIDTH)
    flat[m.mask.reshape(-1)] = rows
    return flat.view(x.shape)


def attended_rows(m, x, rows):
    """The features are a sequence with attention of its own."""
    x[m.mask] = attend(rows[None])[0]
    return x


def to_zeros(m, x, rows):
    new = torch.zeros_like(x)
    new[m.mask] = rows
    return attend(x + new) + new


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
    assigned, colon, number, scalar, one_row, column, tokens, tokens_of_each, last_dim,
    channels, one_entry, entries, scattered, scattered_entries, put, put_and_added,
    through_a_view, through_views_of_a_view, attended_rows, to_zeros, in_a_region,
    constant,
)  # fmt: skip


def added(m, x, rows):
    x[m.mask] += rows
    return x


def added_number(m, x, rows):
    x[m.mask, :] += 0.25
    return x * rows.sum()


def deep_stack(m, x, rows):
    """As Qwen3-VL adds features of deeper layers."""
    x = x.clone()
    new = x[m.mask, :] + rows
    x[m.mask, :] = new
    return x


def mapped(m, x, rows):
    """Rows that are read, computed with, and written back."""
    x[m.mask] = (x[m.mask] * rows).sin()
    return x


def read(m, x, rows):
    return x * 2, (x[m.mask] * rows).sum(), x[m.mask].square().mean()


def selected(m, x, rows):
    return x * rows.sum(), torch.masked_select(x, m.entries).square().sum()


READS = (added, added_number, deep_stack, mapped, read, selected)
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


def run_forms(forms, seq, door, layout, inner="aot_eager") -> dict[str, Comparison]:
    world = torch.distributed.get_world_size()
    reads = any(form in READS for form in forms)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=reads):
        return {
            form.__name__: compare(
                lambda f=form: Rows(f, seq),
                (BATCH, seq, WIDTH),
                world,
                door,
                layout=layout,
                inner=inner,
                strategy="ring",
            )
            for form in forms
        }


SOME = (assigned, tokens_of_each, scattered, in_a_region)
SETTINGS = [
    (2, 16, "plain", "zigzag", SOME),
    (3, 17, "plain", "contiguous", FORMS),
    (2, 16, "dtensor", "contiguous", FORMS),
    (2, 16, "plain", "zigzag", FORMS),
    (3, 17, "dtensor", "contiguous", FORMS),
    (3, 18, "plain", "striped", FORMS),
]


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("world", "seq", "door", "layout", "forms"), SETTINGS)
def test_rows_are_written_by_each_rank(pools, world, seq, door, layout, forms):
    """Nothing is gathered but the rows, where they are a sharded sequence."""
    for ranks in pools[world].run(run_forms, forms, seq, door, layout, timeout=160):
        for name, comparison in ranks.items():
            comparison.check()
            assert door == "dtensor" or not comparison.warnings, name


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "seq", "layout", "forms"),
    [
        (2, 16, "zigzag", SOME_READS),
        (2, 16, "zigzag", READS),
        (3, 17, "contiguous", READS),
    ],
)
def test_rows_that_are_read(pools, world, seq, layout, forms):
    """Rows that are only added to what is there are not read."""
    for ranks in pools[world].run(run_forms, forms, seq, "plain", layout, timeout=110):
        for name, comparison in ranks.items():
            comparison.check()
            adds = name in ("added", "added_number", "deep_stack")
            assert bool(comparison.warnings) is not adds, name


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


def run_mask_of_values(door) -> Comparison:
    world = torch.distributed.get_world_size()
    options = {"strategy": "ring", "layout": "contiguous"}
    return compare(MaskOfValues, (BATCH, 15, WIDTH), world, door, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_mask_of_sharded_values(pools, world, door):
    for comparison in pools[world].run(run_mask_of_values, door, timeout=110):
        comparison.check()


@pytest.mark.timeout(170)
def test_inductor(pools):
    forms = (assigned, scattered, scattered_entries)
    args = (16, "plain", "zigzag", "inductor")
    for ranks in pools[2].run(run_forms, forms, *args, timeout=160):
        for comparison in ranks.values():
            comparison.check()


def run_wrong(extra: int) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Rows(assigned, 16)
    rows = model.rows.shape[0] + extra
    model.rows = nn.Parameter(torch.randn(rows, WIDTH))
    options = {"inner": "aot_eager", "mesh": sequence_mesh(2)}
    compiled = torch.compile(model, backend="cp", options=options)
    try:
        compiled(torch.randn(BATCH, 16, WIDTH))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("extra", [-1, 1])
def test_another_number_of_rows_is_an_error_on_every_rank(pools, extra):
    for text in pools[2].run(run_wrong, extra, timeout=60):
        assert "a mask is True at 13 entries, and" in text
        assert "x[m.mask] = rows" in text or "test_masked_rows.py" in text


def run_without_gradients(seq: int) -> Comparison:
    torch._dynamo.reset()
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    options = {"inner": "aot_eager", "mesh": sequence_mesh(world)}
    deviating = []
    with torch.no_grad():
        for form in SOME:
            model = Rows(form, seq).double()
            x = torch.randn(BATCH, seq, WIDTH, dtype=torch.float64)
            wanted = {form.__name__: model(x)[0]}
            compiled = torch.compile(model, backend="cp", options=options)
            deviating += deviations({form.__name__: compiled(x)[0]}, wanted)
            torch._dynamo.reset()
    return Comparison(deviating, [])


@pytest.mark.timeout(90)
def test_without_gradients(pools):
    for comparison in pools[2].run(run_without_gradients, 16, timeout=80):
        comparison.check()
