"""Drawings: labels that do not touch, tick texts, and matplotlib, which stays quiet and leaves the user's settings alone."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from mezzo.report.charts.canvas import _path, tick_text
from mezzo.report.charts.data import AxisKind
from mezzo.report.charts.svg import apart


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([50.0], [50.0]),
        ([50.0, 80.0], [50.0, 80.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([52.0, 50.0, 51.0], [61.0, 41.0, 51.0]),
        ([0.0, 1.0], [0.0, 10.0]),
        ([100.0, 99.0], [100.0, 90.0]),
    ],
)
def test_labels_move_apart_as_little_as_needed(places: list[float], expected: list[float]) -> None:
    assert apart(places, low=0, high=100, space=10) == expected


def test_labels_never_touch_and_keep_their_order() -> None:
    dice = random.Random(0)
    for _ in range(200):
        places = [dice.uniform(-20, 320) for _ in range(dice.randint(1, 12))]
        moved = apart(places, low=0, high=300, space=16)
        order = sorted(range(len(places)), key=places.__getitem__)
        ordered = [moved[i] for i in order]
        assert all(b - a >= 16 - 1e-6 for a, b in pairwise(ordered))
        assert min(ordered) >= -1e-6
        assert max(ordered) <= 300 + 1e-6


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.30000000000000004, "number", "0.3"),
        (2000.0, "number", "2000"),
        (0.001, "log", "0.001"),
        (15.0, "power", "2^15"),
        (0.05, "percent", "5%"),
        (0.05, "change", "+5%"),
        (-0.05, "change", "-5%"),
        (0.0, "change", "0%"),
        (0.25, "signed", "+0.25"),
        (0.0, "signed", "0"),
    ],
)
def test_tick_texts(value: float, kind: AxisKind, text: str) -> None:
    assert tick_text(value, kind) == text


DRAW = """
import sys
sys.path.insert(0, sys.argv[1])
import record_builders
from mezzo.report.html import render_html
page = render_html(record_builders.compare_record(num_steps=20))
import matplotlib
assert "matplotlib.figure" not in sys.modules
assert matplotlib.rcParams["lines.linewidth"] == 17.0
assert matplotlib.rcParams["svg.fonttype"] == "path"
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
print(page)
"""


def test_a_page_is_the_same_under_a_read_only_home_and_settings_of_ones_own(tmp_path: Path) -> None:
    import record_builders
    from mezzo.report.html import render_html

    home = tmp_path / "home"
    home.write_text("not a folder")  # read-only for everybody, root as well
    (tmp_path / "matplotlibrc").write_text(
        "lines.linewidth: 17\naxes.xmargin: 0.4\naxes.prop_cycle: cycler('color', 'rgb')\n"
    )
    tests = Path(record_builders.__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRAW, str(tests)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={"HOME": str(home), "XDG_CACHE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == render_html(record_builders.compare_record(num_steps=20)).strip()


@pytest.mark.parametrize(
    ("steps", "path"),
    [
        ([("M", 1, 2), ("L", 3.04, 2), ("L", 3.04, 1.96)], "M1 2l2 0"),
        ([("M", 1, 2), ("L", 1.5, 1), ("M", 5, 5), ("L", 6, 6), ("z", 5, 5)], "M1 2l.5-1M5 5l1 1z"),
        ([("M", 1, 2), ("M", 5, 5)], "M1 2h0M5 5h0"),
        ([("M", 1, 2)], "M1 2h0"),
        ([], ""),
    ],
)
def test_paths_are_in_tenths_of_a_pixel_and_relative(steps: list[tuple[str, float, float]], path: str) -> None:
    assert _path(steps) == path
