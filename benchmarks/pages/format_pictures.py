"""How do the formats look: how far they reach, how finely they divide, and what a loss scale saves?

``python -m benchmarks.pages.format_pictures`` writes them to docs/images. The third trains examples/digits.py under ``mezzo ranges``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch

from benchmarks.shared import ROOT
from benchmarks.shared.harness import record_of
from mezzo.commands.ranges.record import GRADIENTS
from mezzo.engine.matrix_units.block_formats import rounded
from mezzo.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format
from mezzo.policy import Policy
from mezzo.policyfields import recipe_of
from mezzo.records import RangesRecord
from mezzo.report.colours import policy_style

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "mezzo"  # the same ids in every run
from matplotlib import pyplot as plt  # noqa: E402  (the backend comes first)
from matplotlib.axes import Axes  # noqa: E402

REACH, UPDATES, GRADIENT_VALUES, BLOCK_VALUES = (
    f"docs/images/formats-{name}.svg" for name in ("reach", "updates", "gradients", "blocks")
)
SHOWN = (FP32, TF32, BF16, FP16, E5M2, E4M3)
SHADES = {"mxfp8": "#0e7b5f", "nvfp4": "#9543d0", "mxfp4": "#bc450a"}
NAMES = {"e5m2": "FP8 E5M2", "e4m3": "FP8 E4M3"}


def colour(name: str) -> str:
    return policy_style(name).terminal


def label(number_format: Format) -> str:
    return NAMES.get(number_format.name, number_format.name.upper())


def draw_reach(axes: Axes) -> None:
    """Draw the powers of two that each format represents: dark with all mantissa bits, light where they run out."""
    for row, shown in enumerate(reversed(SHOWN)):
        least, normal, most = (math.log2(value) for value in (shown.min_subnormal, shown.min_normal, shown.max))
        axes.barh(row, most - normal, left=normal, height=0.55, color=colour(shown.name))
        axes.barh(row, normal - least, left=least, height=0.55, color=colour(shown.name), alpha=0.35)
        axes.text(most + 3, row, f"{shown.min_normal:.2g} to {shown.max:.5g}", va="center", fontsize=8)
    axes.set_yticks(range(len(SHOWN)), [label(shown) for shown in reversed(SHOWN)])
    axes.set_xlim(-155, 215)
    axes.set_xticks(range(-125, 126, 25), [f"$2^{{{power}}}$" for power in range(-125, 126, 25)])
    axes.set_title("How far: normal numbers, and in a lighter shade subnormal ones", loc="left", fontsize=10)


def draw_small_updates(axes: Axes) -> None:
    """Draw a weight of 1 that receives 1,000 updates of 0.0001 in each format."""
    updates = 1000
    for shown in (FP32, FP16, BF16):
        weight, course = torch.ones((), dtype=shown.dtype), []
        for _ in range(updates):
            weight = weight + torch.tensor(1e-4, dtype=shown.dtype)
            course.append(float(weight))
        style = "--" if shown is BF16 else "-"
        axes.plot(course, color=colour(shown.name), linestyle=style, label=f"{label(shown)}: ends at {course[-1]:.4g}")
    axes.set_xlabel("update")
    axes.set_ylabel("weight")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("How finely: 1,000 updates of 0.0001 to a weight of 1", loc="left", fontsize=10)


def draw_gradients(axes: Axes, record: RangesRecord) -> None:
    """Draw the gradients of the digits example by power of two, without a loss scale and with the one that Mezzo suggests."""
    window = next(window for window in record.windows if window.format == "fp16")
    scale = window.suggested or 0
    kinds = [kind.histogram for kind in record.kinds if kind.kind in GRADIENTS]
    total = sum(histogram.nonzero for histogram in kinds)
    for shift, name, filled in ((0, "no loss scale", False), (scale, f"loss scale $2^{{{scale}}}$", True)):
        counts: dict[int, int] = {}
        for histogram in kinds:
            for place, count in enumerate(histogram.counts):
                power = histogram.first_exponent + place + shift
                counts[power] = counts.get(power, 0) + count
        powers = sorted(counts)
        shares = [100 * counts[power] / total for power in powers]
        axes.step(powers, shares, where="mid", color=colour("fp16"), linestyle="-" if filled else "--", label=name)
    least, normal, most = (math.log2(value) for value in (FP16.min_subnormal, FP16.min_normal, FP16.max))
    axes.axvspan(normal, most, color=colour("fp16"), alpha=0.16, label="normal in FP16")
    axes.axvspan(least, normal, color=colour("fp16"), alpha=0.06, label="subnormal in FP16")
    axes.set_xlabel("power of two of the gradient value; left of the shades it becomes zero")
    axes.set_ylabel("% of non-zero values")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("What a loss scale does: gradients of examples/digits.py", loc="left", fontsize=10)


def draw_blocks(axes: Axes) -> None:
    """Draw 64 values, one of which is 30 times the others, as the block formats store them: the error of each value."""
    values = torch.randn(1, 64, generator=torch.Generator().manual_seed(4))
    values[0, 5] = 30.0
    places = torch.arange(64)
    for row, name in enumerate(("mxfp8", "nvfp4", "mxfp4")):
        recipe = recipe_of(Policy.parse(name))
        assert recipe is not None
        found = rounded(values, recipe.values, along=1)
        errors = (found - values)[0].abs()
        mean = float(errors[places != 5].mean())
        axes.bar(
            places + (row - 1) * 0.28, errors, width=0.28, color=SHADES[name], label=f"{name.upper()}: mean {mean:.3f}"
        )
    for edge in range(16, 64, 16):
        axes.axvline(
            edge - 0.5, color="#888888", linewidth=0.8 if edge == 32 else 0.4, linestyle="-" if edge == 32 else ":"
        )
    axes.set_xlim(-0.7, 63.7)
    axes.set_xlabel("place in the row; the large value is at 5; lines end blocks of 32, dots blocks of 16")
    axes.set_ylabel("error")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("What one large value costs its block: 63 values around 1 and one of 30", loc="left", fontsize=10)


def save(name: str, draw: Callable[[Axes], None], *, height: float) -> None:
    """Draw one picture and write it as SVG, on white so that it also reads on a dark page."""
    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    figure.savefig(ROOT / name, metadata={"Date": None})
    plt.close(figure)
    print(name)


def main() -> None:
    save(REACH, draw_reach, height=2.6)
    save(UPDATES, draw_small_updates, height=2.8)
    save(BLOCK_VALUES, draw_blocks, height=2.8)
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "examples" / "digits.py")
        record = record_of(["ranges", "--out", folder, script, "--epochs", "1"], Path(folder))
    save(GRADIENT_VALUES, lambda axes: draw_gradients(axes, record), height=2.8)
