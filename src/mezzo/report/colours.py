"""The colour of each policy and format: the same in every report and terminal table, whatever else is shown.

A family is a format; its shades are the variants of the format, which also differ in their dashes. On the page's light and dark
background every shade has a contrast of 4.5:1 or more, so lines and text share it; the terminal's colour has 4.5:1 on black and on white.
Colour-blind readers can distinguish the hues (after Okabe and Ito, Color Universal Design, 2008).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.records import Row, RunRecord


@dataclass(frozen=True, kw_only=True)
class FormatColours:
    """The colours of one format: one shade each for the plain format, with master weights, and pure."""

    light: tuple[str, ...]
    dark: tuple[str, ...]
    terminal: str = ""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one policy or format is drawn: its family, its shade and its dashes."""

    family: str
    shade: int = 0
    dashes: int = 0
    """0 for a solid line; 1 to 3 for patterns."""

    @property
    def name(self) -> str:
        """The name of the colour, as the page's style sheet has it."""
        return f"{self.family}-{self.shade}"

    @property
    def terminal(self) -> str:
        """The colour in the terminal."""
        return FORMAT_COLOURS[self.family].terminal


FORMAT_COLOURS: dict[str, FormatColours] = {
    "fp32": FormatColours(
        light=("#626d7c", "#48505c", "#333841"), dark=("#98a2ae", "#c5cad2", "#7f8a9a"), terminal="#6a7687"
    ),
    "tf32": FormatColours(
        light=("#866807", "#624d05", "#453604"), dark=("#c79b0a", "#f4c429", "#aa8409"), terminal="#917108"
    ),
    "bf16": FormatColours(
        light=("#1268d8", "#0d4da0", "#093672"), dark=("#67a3f3", "#accdf8", "#3c89ef"), terminal="#1371eb"
    ),
    "fp16": FormatColours(
        light=("#bc450a", "#8b3307", "#632405"), dark=("#f58147", "#fabd9e", "#ee580d"), terminal="#cc4b0b"
    ),
    "fp8": FormatColours(
        light=("#0e7b5f", "#0a5a46", "#074032"), dark=("#14b68e", "#19e4b1", "#119c79"), terminal="#0f8568"
    ),
    "fp64": FormatColours(
        light=("#cc2462", "#981b49", "#6c1334"), dark=("#e980a7", "#f3bbcf", "#e2598b"), terminal="#da2d6d"
    ),
    "other": FormatColours(
        light=("#9543d0", "#7229a5", "#511d75"), dark=("#bf8de2", "#dbc0ef", "#ad6edb"), terminal="#9d52d4"
    ),
}
"""By format; ``other`` is for whatever has no format of its own, such as a script that runs as it is."""
KIND_COLOURS = FormatColours(
    light=("#4a46c9", "#ba2f9e", "#637310", "#0b768c", "#755238"),
    dark=("#9794e0", "#dd79c9", "#a2bd1b", "#12bcde", "#bb9172"),
)
"""For kinds of tensors and of memory; none resembles the colour of a format."""
_ALL = {**FORMAT_COLOURS, "kind": KIND_COLOURS}
_NUM_SHADES = 3
_NUM_DASHES = 4
_FORMATS = (
    (r"bf(loat)?16|b16", "bf16"),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"tf32", "tf32"),
    (r"64|128", "fp64"),
    (r"16|^o[123]$", "fp16"),
    (r"32|^o0$|^no$", "fp32"),
)
_VARIANTS = ((r"master|^o2$", 1), (r"pure|true|^o3$", 2))


def policy_style(policy: str) -> Style:
    """Return how ``policy`` is drawn, alone or among policies of other formats or variants."""
    base, _, fields = policy.lower().partition(",")[0].partition(":")  # after a comma comes the checkpointing
    family = next((name for pattern, name in _FORMATS if re.search(pattern, base)), "other")
    shade = next((number for pattern, number in _VARIANTS if re.search(pattern, base)), 0)
    shade = 0 if family in ("fp32", "other") else shade
    return Style(family=family, shade=shade, dashes=3 if fields else shade)


def policy_styles(policies: Sequence[str]) -> dict[str, Style]:
    """Return the style of each of several policies; those that would look alike get other shades and dashes."""
    styles: dict[str, Style] = {}
    for policy in dict.fromkeys(policies):
        usual = policy_style(policy)
        candidates = (
            Style(
                family=usual.family,
                shade=(usual.shade + step) % _NUM_SHADES,
                dashes=(usual.dashes + turn) % _NUM_DASHES,
            )
            for turn in range(_NUM_DASHES)
            for step in range(_NUM_SHADES)
        )
        styles[policy] = next((style for style in candidates if style not in styles.values()), usual)
    return styles


def kind_style(number: int) -> Style:
    """Return the style of one of several kinds of tensors."""
    return Style(family="kind", shade=number, dashes=0)


def format_style(name: str) -> Style:
    """Return the style of a number format, such as an operand's."""
    return Style(family=policy_style(name).family)


def css_colours() -> str:
    """Return the colours as CSS: variables for light and dark screens, and a class for each colour that sets ``--c``."""
    light = _variables(dark=False)
    names = [f"{name}-{shade}" for name, family in _ALL.items() for shade in range(len(family.light))]
    classes = "".join(f".s-{name}{{--c:var(--{name})}}" for name in names)
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{_variables(dark=True)}}}}}{classes}"


def _variables(*, dark: bool) -> str:
    return "".join(
        f"--{name}-{shade}:{colour};"
        for name, family in _ALL.items()
        for shade, colour in enumerate(family.dark if dark else family.light)
    )


def styles_of(named: Sequence[Row | RunRecord]) -> dict[str, Style]:
    """Return the style of each policy by the name that is shown; it depends on the policy's format, not on that name."""
    styles = policy_styles([one.compared_as for one in named])
    return {one.policy_shown: styles[one.compared_as] for one in named}
