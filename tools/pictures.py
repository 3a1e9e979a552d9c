"""Draw the pictures of docs/ideas: `tools/in_venv python -m tools.pictures`.

What they show is computed here; each is written to docs/images as an SVG.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RANKS = 4
COLOURS = ("#4c78a8", "#f2a65a", "#6aa84f", "#b279a2")  # of the ranks
GREY = "#e9ecef"


def main() -> None:
    matplotlib.rcParams |= {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "cpcompile",  # the same file every time
        "font.size": 9,
    }
    for name, draw in (
        ("mask_tiles", mask_tiles),
        ("layout_work", layout_work),
        ("ring_steps", ring_steps),
    ):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        draw(figure)
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def mask_tiles(figure: Figure) -> None:
    """Draw three packed documents, and the tiles of 8 x 8 pairs that are computed."""
    lengths, tile = (24, 8, 32), 8
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(document.size)
    sees = (document[:, None] == document) & (position[:, None] >= position)
    count = document.size // tile
    shares = sees.reshape(count, tile, count, tile).mean(axis=(1, 3))
    kinds = np.where(shares == 0, 0, np.where(shares == 1, 2, 1))
    left, right = figure.subplots(1, 2)
    left.imshow(sees, cmap=ListedColormap([GREY, COLOURS[0]]))
    left.set_title(f"{int(sees.sum())} of {sees.size:,} pairs seen")
    right.imshow(kinds, cmap=ListedColormap([GREY, COLOURS[1], COLOURS[0]]))
    names = ("none", "partial", "full")
    words = (f"{int((kinds == k).sum())} {name}" for k, name in enumerate(names))
    right.set_title("tiles: " + ", ".join(words))
    for axes in (left, right):
        axes.set_xlabel("keys")
        axes.set_ylabel("queries")
        _bare(axes)


def layout_work(figure: Figure) -> None:
    """Draw whose work each pair of a causal mask is, in two layouts."""
    tokens = np.arange(16)
    chunks = tokens * 2 * RANKS // tokens.size
    layouts = {
        "contiguous": tokens * RANKS // tokens.size,
        "zigzag": np.minimum(chunks, 2 * RANKS - 1 - chunks),
    }
    colours = ListedColormap([GREY, *COLOURS])
    for axes, (name, rank) in zip(
        figure.subplots(1, len(layouts)), layouts.items(), strict=True
    ):
        sees = tokens[:, None] >= tokens
        axes.imshow(np.where(sees, rank[:, None] + 1, 0), cmap=colours)
        work = [int(sees[rank == r].sum()) for r in range(RANKS)]
        axes.set_title(f"{name}, pairs of each rank:\n{', '.join(map(str, work))}")
        axes.set_xlabel("keys")
        axes.set_ylabel("queries, coloured by rank")
        _bare(axes)


def ring_steps(figure: Figure) -> None:
    """Draw the steps of a ring, and its messages, which take 0.7 of a step."""
    axes = figure.subplots()
    for rank in range(RANKS):
        for step in range(RANKS):
            source = (rank - step) % RANKS
            box = [(step, 0.96)]
            axes.broken_barh(box, (-rank, 0.5), color=COLOURS[source])
            words = f"queries {rank}, keys {source}"
            axes.text(step + 0.48, 0.25 - rank, words, ha="center", va="center")
            if step < RANKS - 1:  # keys leave for the next rank
                message = [(step, 0.7)]
                axes.broken_barh(message, (-rank - 0.2, 0.12), color=COLOURS[source])
    ranks = range(RANKS)
    axes.set_yticks([0.2 - rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.set_xticks([step + 0.48 for step in ranks], [f"step {step}" for step in ranks])
    axes.set_title("thick: a step of attention; thin: its keys, sent on meanwhile")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


if __name__ == "__main__":
    main()
