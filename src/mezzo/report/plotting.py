"""What all plots share. Figures are plain dicts in plotly's schema: they need no plotly, and a test can read every point.

The page sets the colours of text, grid and background, because it knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mezzo.report import formatting as fmt

Figure = dict[str, Any]
"""``data`` and ``layout`` as plotly expects them, or a part of either."""

POLICY_COLOURS = (
    "#8a93a3",  # grey for the baseline, so that the eye goes to what is compared with it
    "#4f86f7",
    "#e8893a",
    "#3fae8f",
    "#a974e6",
    "#e0637c",
    "#c9a227",
    "#46b3d1",
)
_LABEL_LENGTH = 20


def policy_colours(policies: Sequence[str]) -> dict[str, str]:
    """Return the colour of each policy in every plot and table of a page."""
    return {p: POLICY_COLOURS[i % len(POLICY_COLOURS)] for i, p in enumerate(policies)}


def base_layout(*, height: int, xaxis: Figure, yaxis: Figure) -> Figure:
    """Return the layout that every plot shares."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
            "itemsizing": "constant",
        },
        "xaxis": {"zeroline": False, "automargin": True, **xaxis},
        "yaxis": {"zeroline": False, "automargin": True, **yaxis},
    }


def label(policy: str) -> str:
    """Return ``policy`` as a plotly label, short enough for a narrow page."""
    # plotly reads a few HTML tags in its labels; a policy's name is text.
    return escape(fmt.shortened(fmt.clean(policy), length=_LABEL_LENGTH), quote=False)


def json_number(value: float) -> float | None:
    """Return ``value`` as the page stores it; None draws nothing."""
    # Six digits are finer than a screen and halve the page. JSON has no NaN.
    return float(f"{value:.6g}") if math.isfinite(value) else None
