"""Two sheets to draw on with the same few strokes: SVG for paper and the web, PNG for slides.

PNG is drawn with Pillow, which Paceline has anyway, at several times its size and then made
smaller, so that slanted lines are smooth. docs/decisions/0036 says why not a plotting library.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL import Image, ImageFont

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

_FONTS = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf")
_BOLD = ("DejaVuSans-Bold.ttf", "LiberationSans-Bold.ttf", "Arial_Bold.ttf")
_GROUND = "#ffffff"
_FAMILY = "'DejaVu Sans', 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


@functools.cache
def font(size: float, bold: bool = False) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font of the system, or the one that comes with Pillow (which knows ASCII only)."""
    from PIL import ImageFont

    for name in _BOLD if bold else _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


@functools.cache
def _has_system_font() -> bool:
    from PIL import ImageFont

    face = font(12.0)
    return isinstance(face, ImageFont.FreeTypeFont) and face.getname()[0] != "Aileron"


def text_width(words: str, size: float, bold: bool = False) -> float:
    """Pixels that a text is wide."""
    return float(font(size, bold).getlength(words))


class SvgCanvas:
    """Draws SVG; everything that came from a file is escaped."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        dashes = f' stroke-dasharray="{" ".join(f"{d:g}" for d in dash)}"' if dash else ""
        self._parts.append(
            f'<polyline points="{_points(points)}" fill="none" stroke="{colour}"'
            f' stroke-width="{width:g}" stroke-linejoin="round"{dashes}/>'
        )

    def area(self, points: Sequence[Point], colour: str) -> None:
        self._parts.append(f'<polygon points="{_points(points)}" fill="{colour}"/>')

    def text(
        self,
        place: Point,
        words: str,
        size: float,
        *,
        colour: str,
        anchor: Anchor = "start",
        bold: bool = False,
        upright: bool = False,
    ) -> None:
        x, y = place
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"'
            f' text-anchor="{anchor}"{weight}{turn}>{escape(_printable(words))}</text>'
        )

    def render(self, title: str, description: str) -> str:
        back = f'<rect width="100%" height="100%" fill="{_GROUND}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' width="{self.width:g}" height="{self.height:g}" role="img"'
            f' font-family="{_FAMILY}">'
            f"<title>{escape(_printable(title))}</title>"
            f"<desc>{escape(_printable(description))}</desc>{back}"
            + "\n".join(self._parts)
            + "</svg>\n"
        )


class PngCanvas:
    """Draws with Pillow, two pixels per unit, each the mean of four."""

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        self._scale = 4
        self._final = (round(width * 2), round(height * 2))
        self._image = Image.new("RGB", (self._final[0] * 2, self._final[1] * 2), _GROUND)
        self._draw = ImageDraw.Draw(self._image)

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        pieces = dashes(points, dash) if dash else [list(points)]
        for piece in pieces:
            if len(piece) > 1:
                self._draw.line(
                    self._pixels(piece), colour, max(1, round(width * self._scale)), joint="curve"
                )

    def area(self, points: Sequence[Point], colour: str) -> None:
        self._draw.polygon(self._pixels(points), fill=colour)

    def text(
        self,
        place: Point,
        words: str,
        size: float,
        *,
        colour: str,
        anchor: Anchor = "start",
        bold: bool = False,
        upright: bool = False,
    ) -> None:
        from PIL import Image, ImageDraw

        words = _printable(words)
        face = font(size * self._scale, bold)
        if not _has_system_font():
            words = words.encode("ascii", "replace").decode()
        x, y = place[0] * self._scale, place[1] * self._scale
        side = {"start": "l", "middle": "m", "end": "r"}[anchor]
        if not upright:
            self._draw.text((x, y), words, fill=colour, font=face, anchor=f"{side}s")
            return
        left, top, right, bottom = face.getbbox(words, anchor="ls")
        sheet = Image.new("L", (math.ceil(right - left) + 2, math.ceil(bottom - top) + 2), 0)
        ImageDraw.Draw(sheet).text((-left, -top), words, fill=255, font=face, anchor="ls")
        turned = sheet.rotate(90, expand=True)
        shift = {"start": turned.height, "middle": turned.height / 2, "end": 0}[anchor]
        corner = (round(x + top), round(y - shift))
        self._image.paste(Image.new("RGB", turned.size, colour), corner, turned)

    def render(self) -> bytes:
        from PIL import Image

        small: Image.Image = self._image.resize(self._final, Image.Resampling.BOX)
        output = io.BytesIO()
        small.save(output, "PNG", optimize=True, dpi=(192, 192))
        return output.getvalue()

    def _pixels(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self._scale, y * self._scale) for x, y in points]


Canvas = SvgCanvas | PngCanvas
"""What a figure is drawn with; pixels, the origin at the top left."""


def dashes(points: Sequence[Point], pattern: Sequence[float]) -> list[list[Point]]:
    """The strokes of a dashed line: `pattern` has lengths of strokes and gaps in turn.

    >>> dashes([(0, 0), (10, 0)], (4, 2))
    [[(0, 0), (4.0, 0.0)], [(6.0, 0.0), (10.0, 0.0)]]
    """
    if not points:
        return []
    strokes: list[list[Point]] = []
    current: list[Point] = [points[0]]
    place, left = 0, float(pattern[0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            at = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if place % 2 == 0:
                strokes.append([*current, at])
            current = [at]
            place += 1
            left = float(pattern[place % len(pattern)])
        left -= length - done
        if place % 2 == 0:
            current.append((float(x1), float(y1)))
    if place % 2 == 0 and len(current) > 1:
        strokes.append(current)
    return strokes


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _printable(words: str) -> str:
    """Without control characters, which XML does not allow even escaped."""
    return "".join(c if c.isprintable() else " " for c in words)


_CORNERS = {
    "square": [45, 135, 225, 315],
    "diamond": [0, 90, 180, 270],
    "triangle-up": [90, 210, 330],
    "triangle-down": [30, 150, 270],
    "pentagon": [90, 162, 234, 306, 18],
}
_STEP = 6.0


def draw_marker(canvas: Canvas, place: Point, kind: str, colour: str, radius: float = 3.5) -> None:
    x, y = place
    if kind in ("x", "cross"):
        turn = math.radians(45 if kind == "x" else 0)
        for angle in (turn, turn + math.pi / 2):
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            canvas.line([(x - dx, y - dy), (x + dx, y + dy)], colour, 2)
        return
    corners = _CORNERS.get(kind, list(range(0, 360, 24)))
    size = radius * (1.25 if kind in _CORNERS else 1.0)
    canvas.area(
        [
            (x + size * math.cos(math.radians(a)), y - size * math.sin(math.radians(a)))
            for a in corners
        ],
        colour,
    )


def draw_block(
    canvas: Canvas, box: tuple[float, float, float, float], colour: str, hatch: str
) -> None:
    """A filled rectangle (left, top, right, bottom) with white strokes over it."""
    left, top, right, bottom = box
    canvas.area([(left, top), (right, top), (right, bottom), (left, bottom)], colour)
    if right - left < 1 or bottom - top < 1:
        return
    for stroke in hatch_lines(box, hatch):
        canvas.line(stroke, "#ffffff", 1.0)


def hatch_lines(
    box: tuple[float, float, float, float], hatch: str
) -> Iterator[tuple[Point, Point]]:
    """The strokes of a hatch inside a box."""
    left, top, right, bottom = box
    if hatch in ("/", "x", "\\"):
        for slope in {"/": (-1,), "\\": (1,), "x": (-1, 1)}[hatch]:
            yield from _slanted(box, slope)
    if hatch in ("-", "+"):
        for place in range(math.ceil(top / _STEP), math.floor(bottom / _STEP) + 1):
            yield (left, place * _STEP), (right, place * _STEP)
    if hatch in ("|", "+"):
        for place in range(math.ceil(left / _STEP), math.floor(right / _STEP) + 1):
            yield (place * _STEP, top), (place * _STEP, bottom)
    if hatch == ".":
        for row in range(math.ceil((top + 1) / _STEP), math.floor((bottom - 1) / _STEP) + 1):
            for column in range(math.ceil(left / _STEP), math.floor((right - 1) / _STEP) + 1):
                at = (column * _STEP, row * _STEP)
                yield at, (at[0] + 1, at[1])


def _slanted(box: tuple[float, float, float, float], slope: int) -> Iterator[tuple[Point, Point]]:
    """Lines y = slope * x + c, cut off at the box."""
    left, top, right, bottom = box
    ends = [y - slope * x for x in (left, right) for y in (top, bottom)]
    step = _STEP * math.sqrt(2)
    for place in range(math.ceil(min(ends) / step), math.floor(max(ends) / step) + 1):
        c = place * step
        across = sorted(((top - c) / slope, (bottom - c) / slope))
        start, end = max(left, across[0]), min(right, across[1])
        if end > start:
            yield (start, slope * start + c), (end, slope * end + c)
