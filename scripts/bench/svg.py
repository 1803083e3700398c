"""A picture as SVG text: shapes and lines of text on a page that is as wide as a telephone."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH = 380
"""Two side by side fit into a README on a wide screen; a telephone of 390 pixels shows one at 94 %."""
MARGIN = 12
SMALL, NORMAL, LARGE = 12, 12.5, 15
"""Sizes of text: at 94 %, the smallest is still above 11 pixels."""
LETTER = 0.56
"""The mean width of a letter of a sans-serif font, as a part of its size; DejaVu Sans is about the widest."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Palette:
    """The colours of a picture; text has a contrast of 4.5 to what it stands on, bars have one of 3."""

    name: str
    page: str
    text: str
    muted: str
    line: str
    ours: str
    peers: str
    limit: str
    good: tuple[str, str]
    """Colours of a cell and of its text."""
    loud: tuple[str, str]
    silent: tuple[str, str]


LIGHT = Palette(
    "light",
    page="#ffffff",
    text="#1f2328",
    muted="#59636e",
    line="#d1d9e0",
    ours="#0969da",
    peers="#818b98",
    limit="#bc4c00",
    good=("#ddf4ff", "#0550ae"),
    loud=("#fff8c5", "#7d4e00"),
    silent=("#ffd8d3", "#a40e26"),
)
DARK = Palette(
    "dark",
    page="#0d1117",
    text="#f0f6fc",
    muted="#9198a1",
    line="#3d444d",
    ours="#4493f8",
    peers="#7d8590",
    limit="#f0883e",
    good=("#12315f", "#a5d6ff"),
    loud=("#3b2f0b", "#eac54f"),
    silent=("#5a1e1b", "#ffc1ba"),
)
PALETTES = (LIGHT, DARK)


class Drawing:
    """Shapes in the order in which they are drawn; y grows downwards, all lengths are pixels."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        fill: str = "",
        size: float = NORMAL,
        anchor: str = "",
        bold: bool = False,
    ) -> None:
        """Write one line with its baseline at y.

        Raises:
            ValueError: It leaves the page.
        """
        width = len(words) * size * LETTER
        left = x - {"": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > WIDTH:
            raise ValueError(f"{words!r} at {x} does not fit: it is about {width:.0f} wide")
        more = f' text-anchor="{anchor}"' if anchor else ""
        more += ' font-weight="600"' if bold else ""
        fill = fill or self.palette.text
        self._parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{more}>{escape(words)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, *, note: str = "") -> None:
        """Fill a rectangle; the note is shown where a pointer rests on it."""
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{fill}"'
        self._parts.append(f"{shape}><title>{escape(note)}</title></rect>" if note else f"{shape}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.5) -> None:
        """Draw a straight line."""
        self._parts.append(f'<path d="M{x1:.1f} {y1:g}L{x2:.1f} {y2:g}" stroke="{stroke}" stroke-width="{width:g}"/>')

    def begin(self, **data: str | float) -> None:
        """Begin a group with data-* attributes: the raw figures behind its shapes."""
        shown = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in data.items()}
        self._parts.append("<g" + "".join(f" data-{name}={quoteattr(value)}" for name, value in shown.items()) + ">")

    def end(self) -> None:
        """End the group."""
        self._parts.append("</g>")

    def finish(self, height: float, title: str, description: str) -> str:
        """The whole file; title and description are read aloud by screen readers."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}"'
            f' viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="title desc" font-family="{FONT}">'
        )
        words = f'<title id="title">{escape(title)}</title>\n<desc id="desc">{escape(description)}</desc>'
        page = f'<rect width="{WIDTH}" height="{height:g}" rx="6" fill="{self.palette.page}"/>'
        return "\n".join([head, words, page, *self._parts, "</svg>", ""])


def heading(drawing: Drawing, title: str, *lines: str) -> float:
    """Write the title and the lines below it; returns where the picture goes on."""
    y = 26.0
    drawing.text(MARGIN, y, title, size=LARGE, bold=True)
    for line in lines:
        y += 17
        drawing.text(MARGIN, y, line, size=SMALL, fill=drawing.palette.muted)
    return y + 10
