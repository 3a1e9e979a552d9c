"""The one place that knows matplotlib: figures in, pictures for a page out.

Colours, here and in cost/strategies.py, are those of Okabe and Ito
(jfly.uni-koeln.de/color), which stay apart for readers who do not see red and green;
nothing is told by colour alone.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpcompile.reporting.drawing.clocks import Activity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVITY_COLORS = {
    Activity.COMPUTE: "#0072B2",
    Activity.COMMUNICATION: "#E69F00",
    Activity.IDLE: "#D9D9D9",
}
MAP_OF_WORK = "Blues"  # one hue, from light to dark
_WIDTH_INCHES = 10.0
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "cpcompile",  # equal plans give equal files
    "font.size": 9,
    "font.family": "sans-serif",
}


@dataclass(frozen=True)
class Picture:
    """An SVG; `alt` says in words what it shows."""

    svg: str
    alt: str

    @property
    def html(self) -> str:
        """An <img> that holds the picture itself."""
        data = base64.b64encode(self.svg.encode()).decode()
        alt = self.alt.replace("&", "&amp;").replace('"', "&quot;")
        return f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'


def draw(paint: Callable[[Figure], str], height_inches: float) -> Picture:
    """The picture that `paint` makes on an empty figure; it returns the words for it.

    Raises: ImportError without matplotlib, naming the extra.
    """
    try:
        # Optional, and slow to import.
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib: pip install "cpcompile[plot]"'
        ) from error
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        alt = paint(figure)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return Picture(content.getvalue(), alt)
