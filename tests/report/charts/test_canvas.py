"""Geometry: lines lie where a figure of matplotlib's has them, to a tenth of a pixel."""

from __future__ import annotations

import io
import math
import random
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mezzo.report.charts.canvas import LAYOUTS, TOP, Geometry, Layout, _path, geometry_of
from mezzo.report.charts.data import Axis, AxisKind, Chart, Line

SETTINGS = {"svg.fonttype": "none", "path.simplify": True, "path.simplify_threshold": 0.3, "text.parse_math": False}
LOWEST = {"number": -9.0, "log": 1e-12, "percent": -9.0}


def chart(num: int, kind: AxisKind, *, staircase: bool) -> Chart:
    """Return a chart of one line through random values, some of them far out or missing."""
    dice, lowest = random.Random(num), LOWEST[kind]
    around = [dice.choice([dice.gauss(1, 0.3), 10 ** dice.uniform(-8, 3), math.nan]) for _ in range(num)]
    y = [value if math.isnan(value) else max(value, lowest) for value in [1.0, *around[1:]]]
    line = Line(name="loss", style="1", y=y)
    x = sorted(dice.sample(range(1, 10 * num + 5), num))
    axes = {"x_axis": Axis(title="step"), "y_axis": Axis(title="loss", kind=kind)}
    texts = {"name": "loss", "title": "Loss", "description": ""}
    return Chart(**texts, **axes, x=x, last_x=x[-1], lines=[line], staircase=staircase)


def drawn(given: Chart, geometry: Geometry, layout: Layout) -> str:
    """Return the path of the line in matplotlib's own SVG of a chart, within the same frame."""
    (line,) = given.lines
    left, _, right, bottom = geometry.frame
    low, high = (end(v for v in line.y if not math.isnan(v)) for end in (min, max))
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(layout.width / 72, given.height / 72), dpi=72)
        FigureCanvasSVG(figure)
        width, height = layout.width, given.height
        axes = figure.add_axes(
            (left / width, (height - bottom) / height, (right - left) / width, (bottom - TOP) / height)
        )
        axes.set_xlim(*geometry.ends)
        is_log = given.y_axis.kind == "log"
        if is_log:
            axes.set_yscale("log", nonpositive="mask")
            low, high = math.log10(low), math.log10(high)
        margin = 0.06 * (high - low) or 0.06 * abs(low) or 1.0
        low, high = low - margin, high + margin
        axes.set_ylim(*((10**low, 10**high) if is_log else (low, high)))
        style = "steps-post" if given.staircase else "default"
        (artist,) = axes.plot(list(given.x), list(line.y), drawstyle=style, scalex=False, scaley=False)
        artist.set_gid("line")
        text = io.StringIO()
        figure.savefig(text, format="svg")
    group = next(g for g in ElementTree.fromstring(text.getvalue()).iter() if g.get("id") == "line")
    words = " ".join(path.get("d", "") for path in group if path.tag.endswith("path")).split()
    starts = [number for number, word in enumerate(words) if word in "ML"]
    return _path([(words[at], float(words[at + 1]), float(words[at + 2])) for at in starts])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("staircase", [False, True], ids=["straight", "stairs"])
@pytest.mark.parametrize("kind", ["number", "log", "percent"])
@pytest.mark.parametrize("num", [1, 2, 10, 64, 65, 127, 128, 500])
def test_a_line_is_matplotlib_s(num: int, kind: AxisKind, staircase: bool, layout: Layout) -> None:
    given = chart(num, kind, staircase=staircase)
    geometry = geometry_of(given, layout)
    assert geometry.lines == [drawn(given, geometry, layout)]
