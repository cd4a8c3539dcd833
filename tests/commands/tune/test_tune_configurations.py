"""The grid of a search, and the arguments of each configuration."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mezzo.commands.tune.plan import Configuration, grid

BATCHES = {"batch-size": ["32", "64"]}
LAYOUT = [(True, False)]

GRIDS = [
    # policies, values of options, changes, the script's arguments, the names
    ([], {}, [], [], ["as-is"]),
    (["bf16"], {}, [], [], ["as-is", "bf16"]),
    (["bf16", "as-is"], {}, LAYOUT, [], ["as-is", "bf16", "as-is, channels-last", "bf16, channels-last"]),
    ([], BATCHES, [], [], ["as-is", "as-is, batch-size 32", "as-is, batch-size 64"]),
    ([], BATCHES, [], ["--batch-size", "64"], ["as-is", "as-is, batch-size 32"]),
    ([], BATCHES, [], ["--batch-size=32"], ["as-is", "as-is, batch-size 64"]),
    ([], {"b": ["32", "64"]}, [], ["-b", "64"], ["as-is", "as-is, b 32"]),
    ([], {"bs": ["32", "64"]}, [], ["--bs", "64", "-bs", "32"], ["as-is", "as-is, bs 32"]),
    ([], BATCHES, [], ["size={batch-size}"], ["as-is, batch-size 32", "as-is, batch-size 64"]),
    (
        [],
        {"a": ["1"], "b": ["2"]},
        [(False, True)],
        [],
        [
            f"as-is{setting}{change}"
            for change in ("", ", compiled")
            for setting in ("", ", b 2", ", a 1", ", a 1, b 2")
        ],
    ),
]


@pytest.mark.parametrize(("policies", "vary", "changes", "own", "names"), GRIDS)
def test_the_grid_begins_with_what_the_script_does_now(
    policies: list[str],
    vary: dict[str, list[str]],
    changes: list[tuple[bool, bool]],
    own: list[str],
    names: list[str],
) -> None:
    assert [one.name for one in grid(policies, vary, changes, own)] == names


@pytest.mark.parametrize(
    ("settings", "own", "arguments"),
    [
        ((), ["--lr", "1"], ["--lr", "1"]),
        ((("batch-size", "64"),), ["--lr", "1"], ["--lr", "1", "--batch-size", "64"]),
        ((("b", "64"),), [], ["-b", "64"]),
        ((("batch", "64"), ("w", "2")), ["data.batch={batch}"], ["data.batch=64", "-w", "2"]),
    ],
)
def test_arguments(settings: tuple[tuple[str, str], ...], own: Sequence[str], arguments: list[str]) -> None:
    assert Configuration(settings=settings).arguments(own) == arguments
