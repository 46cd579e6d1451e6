"""A line plot as one SVG element, for `html_report`. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44

Pair = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """`color`: any CSS colour. `name` is shown when the pointer rests on the line."""

    name: str
    color: str
    points: Sequence[Pair]
    dashed: bool = False
    markers: bool = False


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on `pixels` from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
        """One on which all values fit; with `zero` it begins there."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
        if zero and not log:
            low = min(0.0, low)
        if high <= low:
            low, high = (low / 2, low * 2) if log else (low, low + 1.0)
        return cls(low, high, start, end, log)

    def at(self, value: float) -> float:
        """The pixel of a value; values beyond the ends lie on them."""
        value = min(max(value, self.low), self.high)
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    x_ticks: Sequence[float] | None = None
    """Where the x axis has figures; None: at round ones."""
    y_high: float | None = None
    """Where the y axis ends, if not at the highest value. It begins at 0."""

    def svg(self) -> str:
        x = Axis.over([point[0] for each in self.series for point in each.points], LEFT, WIDTH - RIGHT, log=self.x_log)
        ys = [point[1] for each in self.series for point in each.points]
        ys += [] if self.y_high is None else [self.y_high]
        y = Axis.over(ys, HEIGHT - BOTTOM, TOP, zero=True)
        label = escape(f"{self.title}: {self.y_label} over {self.x_label}", quote=True)
        return "\n".join(
            [
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
                _text(LEFT, 16, self.title, "plot-title"),
                *_x_axis(x, self.x_label, x.ticks() if self.x_ticks is None else self.x_ticks),
                *_y_axis(y, self.y_label),
                *(_line(each, x, y) for each in self.series),
                "</svg>",
            ]
        )


def _x_axis(axis: Axis, label: str, ticks: Sequence[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for tick in ticks:
        parts.append(
            f'<line class="axis" x1="{axis.at(tick):.1f}" x2="{axis.at(tick):.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        )
        parts.append(_text(axis.at(tick), bottom + 17, _number(tick), "tick", "middle"))
    return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, label, "label", "middle")]


def _y_axis(axis: Axis, label: str) -> list[str]:
    parts = []
    for tick in axis.ticks():
        height = axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(LEFT - 6, height + 4, _number(tick), "tick", "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    place = f'text-anchor="middle" transform="translate(13 {middle:g}) rotate(-90)"'
    return [*parts, f'<text class="label" {place}>{escape(label)}</text>']


def _line(series: Series, x: Axis, y: Axis) -> str:
    pixels = [(x.at(a), y.at(b)) for a, b in series.points if math.isfinite(a) and math.isfinite(b)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    color = escape(series.color, quote=True)
    parts = [f'<g style="color:{color}"><title>{escape(series.name)}</title>']
    parts.append(f'<polyline class="line" points="{path}"{dashes}/>')
    if series.markers:
        parts += [f'<circle class="marker" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in pixels]
    return "".join([*parts, "</g>"])


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    """1200 as 1.2k; small ones as they are."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def _linear_ticks(low: float, high: float) -> list[float]:
    """About five, at multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there is room; linear ones where the axis is short."""
    if high / low < 4:
        return _linear_ticks(low, high)
    factors = (1, 2, 5) if high / low < 2e3 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return [round(tick, 12) for tick in ticks if low * 0.999 <= tick <= high * 1.001]
