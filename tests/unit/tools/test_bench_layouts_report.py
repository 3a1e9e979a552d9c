"""The tables of `tools.bench layouts`, of made-up times."""

from __future__ import annotations

import textwrap

import pytest
from expecttest import assert_expected_inline

from tools.bench.layouts.report import markdown


def rounds(layout, *walls, busy):
    """Rounds of two ranks; the backward takes twice as long as the forward."""
    return [
        {"layout": layout, "wall": [x, 2 * x], "busy": [[b, 2 * b] for b in busy]}
        for x in walls
    ]


@pytest.fixture
def text() -> str:
    rows = [
        *rounds("contiguous", 3.0, 4.0, 9.0, busy=(1.0, 3.0)),
        *rounds("zigzag", 2.0, 2.0, 9.0, busy=(2.0, 2.0)),
        *rounds("striped", 3.0, 3.0, 1.0, busy=(2.0, 2.5)),
    ]
    setup = dict.fromkeys(("torch", "python", "processor", "date", "shape"), "?")
    setup |= {"ranks": 2, "tokens": 64, "cores": 2, "reps": 3}
    setup["load_average"] = [0.1, 2.0]
    return markdown({"setup": setup, "alone": rows, "shared": rows})


def test_tables(text):
    lines = text.splitlines()
    start = lines.index("## Ranks of their own") + 4
    assert_expected_inline(
        "\n".join(lines[start : start + 8]),
        """\
| layout | pass | busy, ms | max / min | wall, ms | / contiguous |
| --- | --- | --- | --- | --- | --- |
| contiguous | forward | 1000 3000 | 3.00 | 4000 | 1.00 |
| contiguous | both | 3000 9000 | 3.00 | 12000 | 1.00 |
| zigzag | forward | 2000 2000 | 1.00 | 2000 | 0.50 |
| zigzag | both | 6000 6000 | 1.00 | 6000 | 0.50 |
| striped | forward | 2000 2500 | 1.25 | 3000 | 0.75 |
| striped | both | 6000 7500 | 1.25 | 9000 | 0.75 |""",
    )
    start = lines.index("## Against the targets") + 2
    assert_expected_inline(
        textwrap.fill(lines[start], 80),
        """\
Of ranks of their own. Equal work would take 0.67 of the time of the contiguous
layout. A triangular step took 0.50 of the time of a rectangular one in the
forward; striped has triangular ones only, so that the kernel lets it come down
to 0.67.""",
    )
    assert_expected_inline(
        "\n".join(lines[start + 2 :]),
        """\
| layout | pass | ratio | target | got | verdict |
| --- | --- | --- | --- | --- | --- |
| zigzag | forward | wall / contiguous | <= 0.65 | 0.50 | met |
| zigzag | forward | busy, max / min | <= 1.15 | 1.00 | met |
| zigzag | both | wall / contiguous | <= 0.65 | 0.50 | met |
| zigzag | both | busy, max / min | <= 1.15 | 1.00 | met |
| striped | forward | wall / contiguous | <= 0.65 | 0.75 | missed by 15.4% |
| striped | forward | busy, max / min | <= 1.15 | 1.25 | missed by 8.7% |
| striped | both | wall / contiguous | <= 0.65 | 0.75 | missed by 15.4% |
| striped | both | busy, max / min | <= 1.15 | 1.25 | missed by 8.7% |""",
    )
