"""Small SVG pictures for the report: curves, and arcs of lineage.

They use `currentColor` and the classes s0 to s5, so that the page sets their colors, in light or dark mode. Series
differ in color and in dash pattern. Pictures are 300 wide with text 12 high, so that they can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

SERIES = 6
WIDTH, HEIGHT = 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 36
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 4")
_ROW, _ARC_WIDTH, _LETTER = 28, 120, 8


def style_of(number: int) -> Markup:
    """CSS class and dash pattern of a series, by its index."""
    dash = _DASHES[(number + number // SERIES) % SERIES]
    return Markup('class="s{}"').format(number % SERIES) + (
        Markup(' stroke-dasharray="{}"').format(dash) if dash else ""
    )


def curves(title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str = "step") -> Markup:
    """Line plot. Each series has at least two points, all finite."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(min(ys), max(ys))
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))
    edge = max(_LEFT, 10 + _LETTER * max(len(number(tick)) for tick in y_ticks))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        return edge + across * (WIDTH - edge - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [_title(title, _said(series))]
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(_line(edge, y, WIDTH - _RIGHT, y, "grid"))
        parts.append(_text(edge - 6, y + 4, number(tick), "end"))
    free_from = 0.0
    for tick in ticks(x_low, x_high, most=7):
        x, _ = place(tick, y_low)
        left = min(x - _LETTER * len(number(tick)) / 2, WIDTH - _LETTER * len(number(tick)))
        if x_low <= tick <= x_high and left > free_from:
            parts.append(_text(left, HEIGHT - 20, number(tick), "start"))
            free_from = left + _LETTER * (len(number(tick)) + 1)
    parts.append(_line(edge, HEIGHT - _BOTTOM, WIDTH - _RIGHT, HEIGHT - _BOTTOM, "axis"))
    parts.append(_text((WIDTH + edge - _RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    for place_in_legend, (name, points) in enumerate(series.items()):
        corners = [place(x, y) for x, y in points]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        label = Markup("<title>{}</title>").format(name)
        parts.append(Markup('<polyline points="{}" {}>{}</polyline>').format(shape, style_of(place_in_legend), label))
    return _picture(WIDTH, HEIGHT, parts)


def arcs(title: str, names: Sequence[str], edges: Sequence[tuple[int, int]]) -> Markup:
    """Rows of names, with an arc from row `a` to row `b` for every edge (a, b): b was made from a."""
    height = _ROW * len(names)
    parts = [_title(title, "; ".join(f"{names[b]} from {names[a]}" for a, b in edges))]
    for a, b in edges:
        top, bottom = (a + 0.5) * _ROW, (b + 0.5) * _ROW
        depth = min(_ARC_WIDTH - 14, 14 + 13 * (abs(b - a) - 1))
        bow = _ARC_WIDTH - depth * 4 / 3  # a cubic curve reaches three quarters of the way to its control points
        shape = Markup('<path class="arc" d="M {0} {1} C {2} {1} {2} {3} {0} {3}">').format(
            _ARC_WIDTH, top, bow, bottom
        )
        parts.append(shape + Markup("<title>{} → {}</title></path>").format(names[a], names[b]))
    for row, name in enumerate(names):
        middle = (row + 0.5) * _ROW
        parts.append(Markup('<circle class="node" cx="{}" cy="{}" r="4"/>').format(_ARC_WIDTH, middle))
        parts.append(_text(_ARC_WIDTH + 10, middle + 4, name, "start", "name"))
    return _picture(WIDTH, height, parts)


def swatch(number: int) -> Markup:
    """A short piece of a series' line, for a legend."""
    line = Markup('<line x1="1" y1="5" x2="25" y2="5" {}/>').format(style_of(number))
    frame = '<svg class="swatch" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">{}</svg>'
    return Markup(frame).format(line)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, at most `most` of them."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number as short text: also nan and inf, which a reward model or a function of the user's may give."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 100_000:
        return f"{value / 1000:,.0f}k"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.001:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _said(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Text description of the picture, for screen readers."""
    return "; ".join(
        f"{name} from {number(points[0][1])} at {number(points[0][0])} to {number(points[-1][1])} at "
        f"{number(points[-1][0])}"
        for name, points in series.items()
    )


def _picture(width: int, height: int, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg class="picture" viewBox="0 0 {} {}" role="img">').format(width, height)
    return head + Markup("").join(parts) + Markup("</svg>")


def _title(title: str, description: str) -> Markup:
    return Markup("<title>{}</title><desc>{}</desc>").format(title, description)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, escape(text)
    )
