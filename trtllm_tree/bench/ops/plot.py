"""The roofline plot of measured rows as one SVG file. Knows rows only; no plotting library.

Left: ops with matrix work, achieved TFLOP/s over FLOP per byte, under the ceilings. Right: ops without any, the share
of their floor. Points are numbered, and the key below names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from trtllm_tree.bench.ops.entry import Ceilings
from trtllm_tree.bench.ops.report import LATENCY_FLOOR_US, Row, conditions

_WIDTH, _MARGIN = 1240, 60
_PLOT_WIDTH, _PLOT_HEIGHT, _TOP = 700, 620, 90
_BARS_LEFT, _BARS_WIDTH, _BAR_STEP = 860, 320, 19
_KEY_STEP = 17
_COLOURS = (
    *("#1f6fb4", "#c8501e", "#2b8a4b", "#8e4bb0", "#a8801a", "#b02a5b"),
    *("#4a5a6a", "#1a9a9a", "#7a5230", "#6d7f12", "#d07aa8", "#2b2f77"),
)
_STYLE = (
    "text{font:12px Helvetica,Arial,sans-serif;fill:#222}"
    ".title{font-size:17px;font-weight:600}.note{fill:#666;font-size:11px}.number{font-size:10px}"
    ".grid{stroke:#e6e8eb}.axis{stroke:#555}.roof{stroke:#333;stroke-width:2;fill:none}"
    ".lead{stroke:#aaa;stroke-width:.7}"
)


@dataclass(frozen=True)
class _LogAxis:
    """Maps values between two powers of ten to pixels."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> _LogAxis:
        logs = [math.log10(value) for value in values]
        return cls(math.floor(min(logs)), math.ceil(max(logs)), start, end)

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def roofline_svg(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """The plot of `rows` under `ceilings`."""
    matrix = [(n, row) for n, row in enumerate(rows, start=1) if row.flops]
    other = [(n, row) for n, row in enumerate(rows, start=1) if not row.flops]
    colours = {op: _COLOURS[i % len(_COLOURS)] for i, op in enumerate(dict.fromkeys(r.op for r in rows))}
    bottom = _TOP + max(_PLOT_HEIGHT + 60, (len(other) + 3) * _BAR_STEP)
    parts = [_text(_MARGIN, 36, "Roofline: what each op reaches", "title")]
    if rows:
        parts.append(_text(_MARGIN, 56, conditions(rows[0]), "note"))
    parts.append(_text(_MARGIN, bottom, "Sizes that all rows of an op share are in the table only.", "note"))
    parts += _roofline(matrix, ceilings, colours)
    parts += _shares(other, colours)
    parts += _key(rows, colours, bottom + 10)
    height = bottom + 40 + _KEY_STEP * -(-len(rows) // 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _number(value: float) -> str:
    return f"{value:g}"


def _roofline(rows: Sequence[tuple[int, Row]], roof: Ceilings, colours: dict[str, str]) -> list[str]:
    """Axes, ceilings and numbered points."""
    ridge, peak = roof.flops_per_s / roof.bytes_per_s, roof.flops_per_s / 1e12
    points = [(n, row, row.flops / row.bytes_moved, row.flops / row.median_us / 1e6) for n, row in rows]
    left, right, bottom = _MARGIN, _MARGIN + _PLOT_WIDTH, _TOP + _PLOT_HEIGHT
    x = _LogAxis.around([ridge / 20, ridge * 3, *(p[2] for p in points)], left, right)
    y = _LogAxis.around([peak, peak / 20, *(p[3] for p in points)], bottom, _TOP)
    parts = []
    for tick in x.ticks:
        parts += [_line(x.at(tick), _TOP, x.at(tick), bottom, "grid")]
        parts += [_text(x.at(tick), bottom + 18, _number(tick), anchor="middle")]
    for tick in y.ticks:
        parts += [_line(left, y.at(tick), right, y.at(tick), "grid")]
        parts += [_text(left - 8, y.at(tick) + 4, _number(tick), anchor="end")]
    parts += [_line(left, bottom, right, bottom, "axis"), _line(left, _TOP, left, bottom, "axis")]
    parts.append(_text((left + right) / 2, bottom + 40, "FLOP per byte moved", anchor="middle"))
    parts.append(_text(left, _TOP - 12, "achieved TFLOP/s"))
    # Where the slope enters the picture: at the left edge or through the bottom.
    start = max(x.ticks[0], y.ticks[0] * 1e12 / roof.bytes_per_s)
    corners = [(start, start * roof.bytes_per_s / 1e12), (ridge, peak), (x.ticks[-1], peak)]
    path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in corners)
    parts.append(f'<polyline points="{path}" class="roof"/>')
    parts.append(_text(right - 4, y.at(peak) - 7, f"{peak:.0f} TFLOP/s", anchor="end"))
    parts.append(
        _text(x.at(2 * start) + 10, y.at(2 * corners[0][1]) + 10, f"{roof.bytes_per_s / 1e12:.1f} TB/s")
    )
    return parts + _points([(n, row, x.at(a), y.at(b)) for n, row, a, b in points], colours)


def _points(points: Sequence[tuple[int, Row, float, float]], colours: dict[str, str]) -> list[str]:
    """A dot each, and its number at the nearest place where none stands yet."""
    dots, labels = [], []
    taken = [(x, y) for _, _, x, y in points]
    for number, row, x, y in points:
        place = _free_place(x, y, taken)
        taken.append(place)
        hint = f"{number}: {row.op} {row.shape_text} {row.dtype}, {row.median_us:.2f} us"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[row.op]}" fill-opacity=".8">'
            f"<title>{escape(hint)}</title></circle>"
        )
        labels.append(_line(x, y, *place, "lead"))
        labels.append(_text(place[0], place[1] + 3.5, str(number), "number", "middle"))
    return labels + dots


def _free_place(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Rings of places around a point, nearest first."""
    for radius in range(13, 140, 9):
        for step in range(16):
            angle = 2 * math.pi * (step + 0.5) / 16
            place = (x + radius * math.cos(angle), y + radius * math.sin(angle))
            inside = place[0] > _MARGIN + 8 and _TOP < place[1] < _TOP + _PLOT_HEIGHT - 8
            if inside and all(abs(place[0] - a) > 13 or abs(place[1] - b) > 10 for a, b in taken):
                return place
    return x, y - 13


def _shares(rows: Sequence[tuple[int, Row]], colours: dict[str, str]) -> list[str]:
    """Bars: floor over time of the ops without matrix work; latency where the floor is nothing."""
    if not rows:
        return []
    parts = [_text(_BARS_LEFT, _TOP - 12, "no matrix work: floor / time")]
    end = _TOP + len(rows) * _BAR_STEP + 6
    for percent in (0, 25, 50, 75, 100):
        at = _BARS_LEFT + _BARS_WIDTH * percent / 100
        parts.append(_line(at, _TOP, at, end, "grid"))
        parts.append(_text(at, end + 14, f"{percent} %", "note", "middle"))
    for place, (number, row) in enumerate(rows):
        top = _TOP + 6 + place * _BAR_STEP
        share = min(1.0, 1 / row.ratio)
        is_latency = row.floor_us < LATENCY_FLOOR_US
        width = 0 if is_latency else _BARS_WIDTH * share
        note = "latency" if is_latency else f"{100 / row.ratio:.0f} %"
        parts.append(
            f'<rect x="{_BARS_LEFT}" y="{top}" width="{width:.1f}" height="12" '
            f'fill="{colours[row.op]}" fill-opacity=".8"/>'
        )
        parts.append(_text(_BARS_LEFT - 8, top + 10, str(number), "number", "end"))
        inside = width > 0.6 * _BARS_WIDTH
        label = f"{row.median_us:.1f} us, {note}"
        at = (
            f'x="{_BARS_LEFT + width - 6:.1f}" style="fill:#fff" text-anchor="end"'
            if inside
            else f'x="{_BARS_LEFT + width + 6:.1f}"'
        )
        parts.append(f'<text {at} y="{top + 10}" class="number">{escape(label)}</text>')
    return parts


def _key(rows: Sequence[Row], colours: dict[str, str], top: float) -> list[str]:
    """Two columns: number, op, what tells the row from the op's others, time."""
    parts = []
    half = -(-len(rows) // 2)
    for index, row in enumerate(rows):
        x = _MARGIN + (index // half) * (_WIDTH - _MARGIN) / 2
        y = top + 16 + (index % half) * _KEY_STEP
        siblings = [other for other in rows if other.op == row.op]
        sizes = [
            f"{k}={v}" for k, v in row.shape.items() if any(other.shape.get(k) != v for other in siblings)
        ]
        sizes += [row.dtype] if any(other.dtype != row.dtype for other in siblings) else []
        line = f"{index + 1}  {row.op}  {' '.join(sizes)}: {row.median_us:.1f} us"
        line += f", {row.ratio:.2f} x floor" if row.floor_us >= LATENCY_FLOOR_US else ""
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colours[row.op]}"/>')
        parts.append(_text(x + 10, y, line, "number"))
    return parts
