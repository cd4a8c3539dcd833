"""The view of a prediction."""

from __future__ import annotations

import io

from rich.console import Console

import record_builders as build
from mezzo.report.html import render_html
from mezzo.report.text import render


def test_the_largest_batch_is_shown_with_its_headroom_and_each_card_with_its_memory() -> None:
    record = build.predict_record()
    screen = io.StringIO()
    render(record, Console(file=screen, width=110))
    for text in (screen.getvalue(), render_html(record)):
        assert f"largest batch ({record.headroom:.0%} of the memory left free)" in text
        assert "80.0 GiB" in text  # a100-80gb
        assert "16.0 GiB" in text  # t4
