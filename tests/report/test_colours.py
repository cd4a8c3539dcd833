"""The colours of formats: fixed, distinguishable, and with enough contrast on every background."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mezzo.report
from mezzo.report.colours import (
    FORMAT_COLOURS,
    KIND_COLOURS,
    Style,
    css_colours,
    format_style,
    policy_style,
    policy_styles,
)

PAPERS = {"light": ("#ffffff", "#f6f7f9"), "dark": ("#101216", "#191c22")}


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_shade_has_the_contrast_of_text_on_every_paper() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name, family in {**FORMAT_COLOURS, "kind": KIND_COLOURS}.items():
        for scheme, shades in (("light", family.light), ("dark", family.dark)):
            for shade in shades:
                for paper in PAPERS[scheme]:
                    assert contrast(shade, paper) >= 4.5, (name, scheme, shade, paper)


def test_terminal_colours_read_on_black_and_on_white() -> None:
    for family in FORMAT_COLOURS.values():
        assert min(contrast(family.terminal, paper) for paper in ("#000000", "#ffffff")) >= 4.5


def test_the_papers_are_those_of_the_style_sheet() -> None:
    sheet = (Path(mezzo.report.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    found = re.findall(r"--(?:paper|sheet): (#\w{6})", sheet)
    assert found == [*PAPERS["light"], *PAPERS["dark"]]


@pytest.mark.parametrize(
    ("policy", "family", "shade", "dashes"),
    [
        ("fp32", "fp32", 0, 0),
        ("no", "fp32", 0, 0),
        ("O0", "fp32", 0, 0),
        ("32-true", "fp32", 0, 0),
        ("tf32", "tf32", 0, 0),
        ("bf16", "bf16", 0, 0),
        ("bf16-mixed", "bf16", 0, 0),
        ("mixed_bfloat16", "bf16", 0, 0),
        ("bf16-master", "bf16", 1, 1),
        ("bf16-pure", "bf16", 2, 2),
        ("fp16", "fp16", 0, 0),
        ("O1", "fp16", 0, 0),
        ("16-mixed", "fp16", 0, 0),
        ("fp16-master", "fp16", 1, 1),
        ("O2", "fp16", 1, 1),
        ("fp16-pure", "fp16", 2, 2),
        ("O3", "fp16", 2, 2),
        ("16-true", "fp16", 2, 2),
        ("fp16:init_scale=32", "fp16", 0, 3),
        ("fp8", "fp8", 0, 0),
        ("as-is", "other", 0, 0),
    ],
)
def test_a_policy_is_drawn_alike_everywhere(policy: str, family: str, shade: int, dashes: int) -> None:
    assert policy_style(policy) == Style(family=family, shade=shade, dashes=dashes)
    assert policy_styles(["fp32:op_lists=device", policy])[policy] == policy_style(policy)


def test_variants_of_one_format_differ_on_a_page() -> None:
    policies = ["fp16", *(f"fp16:init_scale={n}" for n in range(10))]
    styles = policy_styles(policies)
    assert {style.family for style in styles.values()} == {"fp16"}
    assert len(set(styles.values())) == len(policies)
    assert styles["fp16"] == policy_style("fp16")


def test_formats_of_operands_have_the_colours_of_policies() -> None:
    names = {
        n: format_style(n).family
        for n in ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "fp64", "complex128", "int8")
    }
    assert names == {
        "fp32": "fp32",
        "tf32": "tf32",
        "fp16": "fp16",
        "bf16": "bf16",
        "e4m3": "fp8",
        "e5m2": "fp8",
        "fp64": "fp64",
        "complex128": "fp64",
        "int8": "other",
    }


def test_the_style_sheet_has_every_colour_in_light_and_dark() -> None:
    css = css_colours()
    for name, family in {**FORMAT_COLOURS, "kind": KIND_COLOURS}.items():
        for shade in range(len(family.light)):
            assert css.count(f"--{name}-{shade}:") == 2
            assert f".s-{name}-{shade}{{--c:var(--{name}-{shade})}}" in css
