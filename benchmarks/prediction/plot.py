"""Predicted against measured values as a picture: one dot per row, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

_COLOURS = ("#1268d8", "#bc450a", "#0e7b5f", "#9543d0", "#866807", "#cc2462", "#626d7c")


def plot(
    path: Path, groups: Sequence[str], measured: np.ndarray, predicted: np.ndarray, *, unit: str, title: str
) -> None:
    """Write an SVG to ``path``; each row has its group, and the dashed lines are 20% off."""
    mpl.use("svg")
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "mezzo", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        axes = figure.add_subplot()
        ends = np.array([min(measured.min(), predicted.min()) / 1.3, max(measured.max(), predicted.max()) * 1.3])
        axes.plot(ends, ends, color="#9aa2ad", linewidth=1)
        for factor in (0.8, 1.2):
            axes.plot(ends, factor * ends, color="#c4c9d0", linewidth=1, linestyle="--")
        for group, colour in zip(sorted(set(groups)), _COLOURS * 3, strict=False):
            own = np.array([one == group for one in groups])
            axes.scatter(measured[own], predicted[own], s=14, color=colour, alpha=0.75, linewidths=0, label=group)
        axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}", title=title)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
