"""The one place that knows matplotlib: figures in, pictures for a page out.

Colours, here and in cost/strategies.py, are those of Okabe and Ito
(jfly.uni-koeln.de/color), which stay apart for readers who do not see red and green;
nothing is told by colour alone.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cpcompile.reporting.drawing.simulated_clocks import Activity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVITY_COLORS = {
    Activity.COMPUTE: "#0072B2",
    Activity.COMMUNICATION: "#E69F00",
    Activity.IDLE: "#D9D9D9",
}
MAP_OF_WORK = "Blues"  # one hue, from light to dark
_WIDTH_INCHES = 10.0
# Characters that a data URL may have as they are, inside of double quotes.
_READABLE = " !$'()*+,-./:;=?@[]_~|{}^\\`"
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
        """An <img> that holds the picture itself, as text: base64 is a third longer."""
        data = quote(self.svg, safe=_READABLE)
        alt = self.alt.replace("&", "&amp;").replace('"', "&quot;")
        return f'<img alt="{alt}" src="data:image/svg+xml,{data}">'


def draw(paint: Callable[[Figure], str], height_inches: float) -> Picture:
    """Draw a picture: `paint` fills an empty figure, and returns the words for it.

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
    return Picture(short(content.getvalue()), alt)


def short(svg: str) -> str:
    """Remove what nobody sees from a picture: half of what matplotlib writes."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    named = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda m: m[0] if m[1] in named else "", svg)
    svg = re.sub(r"<[^>]*>", _with_short_numbers, svg)
    svg = re.sub(r'font-family: [^;"]*', "font-family: sans-serif", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><")
    return _with_classes(svg).replace('"', "'")


def _with_short_numbers(tag: re.Match[str]) -> str:
    """Cut places, in 1/72 inch, to hundredths; text between tags is not touched."""
    return re.sub(r'(?<=[\s"(,-])(\d+\.\d\d)\d+', r"\1", tag[0])


def _with_classes(svg: str) -> str:
    """Write only once the looks, and clips, that several elements have."""
    attributes = r'(?: clip-path="[^"]*")? style="[^"]*"'
    counted = Counter(re.findall(attributes, svg))
    classes = {x: f"s{i}" for i, x in enumerate(counted) if counted[x] > 1}
    rules = ""
    for look, name in classes.items():
        clip, style = re.findall(r'^(?: clip-path="([^"]*)")? style="([^"]*)"', look)[0]
        rules += f".{name}{{{style}" + (f";clip-path: {clip}" if clip else "") + "}"
    svg = re.sub(
        attributes,
        lambda m: f' class="{classes[m[0]]}"' if m[0] in classes else m[0],
        svg,
    )
    return svg.replace("</style>", f"{rules}</style>", 1)
