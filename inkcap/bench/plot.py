"""Small plots as SVG text: panels with lines or points on linear axes. No dependency, and nothing to tune."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Point = tuple[float, float]
WIDTH, HEIGHT = 460, 280  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 42  # around the axes
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1d2126}.t{font-weight:600;font-size:13px}"
    ".g{stroke:#dcd8cf;stroke-width:1}.l{fill:none;stroke:#2f5f98;stroke-width:1.5}"
    ".p{fill:#2f5f98;fill-opacity:.55}"
)


@dataclass(frozen=True)
class Panel:
    """One pair of axes, from 0 up. `points` are joined by a line, or stand alone as dots."""

    title: str
    across: str  # what the x axis counts
    points: Sequence[Point]
    dots: bool = False
    top: float | None = None  # of the y axis; default: what the points need


def steps(most: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to `most` or just above: 1, 2 or 5 times a power of ten apart."""
    if not most > 0:
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def panel_svg(panel: Panel, left: float, top: float) -> list[str]:
    xs = steps(max((x for x, _ in panel.points), default=0.0))
    ys = steps(panel.top or max((y for _, y in panel.points), default=0.0))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> Point:
        return left + LEFT + x / xs[-1] * inner_width, top + TOP + (1 - y / ys[-1]) * inner_height

    lines = [f'<text class="t" x="{left + LEFT}" y="{top + 20}">{escape(panel.title)}</text>']
    middle = left + LEFT + inner_width / 2
    lines.append(f'<text x="{middle}" y="{top + HEIGHT - 6}" text-anchor="middle">{escape(panel.across)}</text>')
    for y in ys:
        (x0, level), (x1, _) = at(0, y), at(xs[-1], y)
        lines.append(f'<path class="g" d="M{x0:.1f} {level:.1f}H{x1:.1f}"/>')
        lines.append(f'<text x="{x0 - 6:.1f}" y="{level + 4:.1f}" text-anchor="end">{shown(y)}</text>')
    for x in xs:
        across, floor = at(x, 0)
        lines.append(f'<text x="{across:.1f}" y="{floor + 17:.1f}" text-anchor="middle">{shown(x)}</text>')
    places = [at(x, y) for x, y in panel.points]
    if panel.dots:
        lines += [f'<circle class="p" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
    elif places:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline class="l" points="{path}"/>')
    return lines


def figure(title: str, panels: Sequence[Panel]) -> str:
    """An SVG document: the title, then the panels, two in a row."""
    rows = (len(panels) + 1) // 2
    width, height = 2 * WIDTH, rows * HEIGHT + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="t" x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        lines += panel_svg(panel, index % 2 * WIDTH, 30 + index // 2 * HEIGHT)
    return "\n".join([*lines, "</svg>"]) + "\n"


def cumulative(values: Sequence[float], most: int = 400) -> list[Point]:
    """The share of values up to each value, thinned out to about `most` points."""
    if not values:
        return []
    ordered = sorted(values)
    stride = max(1, len(ordered) // most)
    kept = [*range(0, len(ordered), stride), len(ordered) - 1]
    return [(0.0, 0.0), *((ordered[i], (i + 1) / len(ordered)) for i in kept)]
