"""What the views say, word for word, as data and in the terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

import record_builders as build
from helpers_compare import run
from mezzo.commands.compare import page as compare
from mezzo.records import (
    CompareRecord,
    Difference,
    DoctorRecord,
    Effective,
    Loss,
    Memory,
    Record,
    RunRecord,
    ScaleName,
    SharedFile,
    Steps,
    write_record,
)
from mezzo.report import formatting, pages, terminal
from mezzo.report.charts.data import Chart
from mezzo.report.colours import Style, policy_style
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.sections import Cell, Formats, Grid, Section

NAN, INF = float("nan"), float("inf")
REPORT = Path(terminal.__file__).parent


def rendered(record: RunRecord | CompareRecord | DoctorRecord, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    terminal.render(record, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in output.splitlines())


def verdicts(record: CompareRecord) -> Grid:
    return page_of(record).grid("Policy by policy")


# Formatting


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.bytes_text(0), "0 B"),
        (formatting.bytes_text(1023), "1023 B"),
        (formatting.bytes_text(1024), "1.00 KiB"),
        (formatting.bytes_text(1024 * 1024 - 1), "1.00 MiB"),
        (formatting.bytes_text(80 * 1024**3), "80.0 GiB"),
        (formatting.bytes_text(None), "unknown"),
        (formatting.ms_text(12.345), "12.3 ms"),
        (formatting.ms_text(999.6), "1.00 s"),
        (formatting.ms_text(0.04567), "0.0457 ms"),
        (formatting.ms_text(NAN), "NaN"),
        (formatting.ms_text(None), "-"),
        (formatting.ratio_text(1.6094), "1.61x"),
        (formatting.ratio_text(0.0), "0x"),
        (formatting.ratio_text(12.34), "12.3x"),
        (formatting.ratio_text(9.999), "10.0x"),
        (formatting.ratio_text(1234.4), "1234x"),
        (formatting.ratio_text(None), "-"),
        (formatting.spread_text(1.5, 1.7), "1.50x to 1.70x"),
        (formatting.spread_text(None, 1.7), ""),
        (formatting.spread_text(NAN, 1.7), ""),
        (formatting.interval_text(-0.00392, 0.0065), "-0.0039 to +0.0065"),
        (formatting.interval_text(NAN, NAN), "no interval"),
        (formatting.signed_text(0.0), "0"),
        (formatting.signed_text(-INF), "-Infinity"),
        (formatting.number_text(0.392134), "0.3921"),
        (formatting.number_text(INF), "Infinity"),
        (formatting.share_text(0.0004), "<0.1%"),
        (formatting.share_text(0.9996), ">99.9%"),
        (formatting.share_text(0.973), "97.3%"),
        (formatting.share_text(1.0), "100%"),
        (formatting.scale_text(65536.0), "65536"),
        (formatting.scale_text(2.0**24), "2^24"),
        (formatting.scale_text(2.0**-24), "2^-24"),
        (formatting.scale_text(1000.0), "1000"),
        (formatting.scale_text(0.0), "0"),
        (formatting.scale_text(None), "none"),
        (formatting.mean_text(3.0), "3"),
        (formatting.mean_text(2.3333), "2.3"),
        (formatting.duration_text(12.34), "12.3 s"),
        (formatting.duration_text(3599.6), "1 h 00 min"),
        (formatting.duration_text(200), "3 min 20 s"),
        (formatting.shortened("fp16:fp32_modules=head.*", length=20), "fp16:fp32...s=head.*"),
        (formatting.listed(["a", "b", "c"]), "a, b and c"),
        (formatting.date_text("2026-11-22T12:48:40+00:00"), "2026-11-22 12:48 UTC"),
        (formatting.date_text("2026-11-22T12:48:40+02:00"), "2026-11-22 12:48 +0200"),
        (formatting.date_text("some day"), "some day"),
        (formatting.clean_line("\tif x:\x1b[31m\u202e"), "    if x:\ufffd[31m\ufffd"),
        (formatting.flops_text(0), "0"),
        (formatting.flops_text(999), "999 FLOP"),
        (formatting.flops_text(2_500_000), "2.50 MFLOP"),
        (formatting.flops_text(3 * 10**12), "3.00 TFLOP"),
        (formatting.clean("a\x1b[31m\u202eb\nc"), "a\ufffd[31m\ufffdb c"),
        (formatting.clean("a\nb", keep_lines=True), "a\nb"),
    ],
)
def test_formatting(shown: str, expected: str) -> None:
    assert shown == expected


# Sheets


def test_a_comparison_says_the_verdict_first() -> None:
    page = page_of(build.compare_record())
    assert page.answer.sentence == "bf16 trains like fp32, 1.61x as fast (1.57x to 1.66x)."
    assert page.answer.detail == "fp16-pure diverged. fp16 is undecided."
    assert page.title == "train.py: fp32, bf16, fp16 and fp16-pure"
    assert page.command == "mezzo compare --policies fp32,bf16,fp16,fp16-pure train.py --epochs 3"


def test_verdict_line_word_for_word() -> None:
    table = verdicts(build.compare_record())
    assert table.rows[2] == (
        Cell(text="fp16", style=Style(family="fp16")),
        Cell(text="undecided", tone="open"),
        Cell(text="24.9 ms", below=("1.66x", "1.61x to 1.70x")),
        Cell(text="1.99 GiB", below=("0.813x",)),
        Cell(text="0.4012", below=("+0.0091", "-0.012 to +0.031")),
        Cell(text="0.9098", below=("-0.0012", "-0.0052 to +0.0028")),
        "3",
        "8192",
    )
    assert table.reasons[2] == "the loss differs by +0.0091 (-0.0124 to +0.0306), across the margin of 0.02"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"speedup_low": 0.98}, "bf16 trains like fp32, but not measurably faster."),
        ({"speedup_low": None}, "bf16 trains like fp32, but not measurably faster."),
        (
            {"speedup": 0.8, "speedup_low": 0.75, "speedup_high": 0.9},
            "bf16 trains like fp32, but slower, 0.800x as fast (0.750x to 0.900x).",
        ),
        ({"emulated": True}, "bf16 trains like fp32; emulated, so no speed is claimed."),
        ({"speedup": None}, "bf16 trains like fp32."),
        ({"verdict": "different"}, "No policy was shown to train like fp32."),
    ],
)
def test_headline(changes: dict[str, object], expected: str) -> None:
    rows = build.compare_rows()
    rows[1] = rows[1].model_copy(update=changes)
    assert page_of(build.compare_record(rows=rows)).answer.sentence == expected


def test_headline_of_several_equivalent_policies() -> None:
    rows = build.compare_rows()
    rows[2] = rows[2].model_copy(update={"verdict": "equivalent"})
    headline = page_of(build.compare_record(rows=rows)).answer.sentence
    assert headline == "bf16 and fp16 train like fp32; fp16 is fastest, 1.66x as fast (1.61x to 1.70x)."


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"speedup_low": 0.98}, "bf16 is not measurably faster"),
        (
            {"speedup": 0.8, "speedup_low": 0.75, "speedup_high": 0.9},
            "bf16 is slower, 0.800x as fast (0.750x to 0.900x)",
        ),
    ],
)
def test_a_headline_of_native_and_emulated_policies(changes: dict[str, object], clause: str) -> None:
    rows = build.compare_rows()
    rows[1] = rows[1].model_copy(update=changes)
    rows[2] = rows[2].model_copy(update={"verdict": "equivalent", "emulated": True})
    headline = page_of(build.compare_record(rows=rows)).answer.sentence
    assert headline == f"bf16 and fp16 train like fp32; {clause}; no speed is claimed for emulated formats."


def test_a_headline_names_what_went_wrong() -> None:
    rows = [
        build.row("fp32", "baseline"),
        build.row("bf16-pure", "stopped_learning"),
        build.row("fp16", "failed", num_failed=1),
        build.row("fp8", "failed", num_failed=3),
    ]
    page = page_of(build.compare_record(rows=rows))
    assert page.answer.detail == "bf16-pure stopped learning. fp16 failed in 1 of 3 runs. fp8 failed."
    words = [row[1] for row in page.grid("Policy by policy").rows[1:]]
    assert words == [Cell(text=word, tone="bad") for word in ("stopped learning", "failed", "failed")]


def test_runs_that_share_a_file_come_before_any_verdict() -> None:
    shared = SharedFile(path="/out/last.pt", written_by="fp32 with seed 0", read_by="bf16 with seed 0")
    record = build.compare_record(shared_files=[shared])
    page = page_of(record)
    assert page.answer.sentence == "The runs are not independent, so no verdict holds."
    assert page.answer.detail == (
        "The run of bf16 with seed 0 read /out/last.pt, which the run of fp32 with seed 0 had written. Give each run a path "
        "of its own: {run} in the script's arguments becomes the run's name, as in --output_dir out/{run}."
    )
    assert "{run} in the script&#39;s arguments" in render_html(record)


def test_several_losses_have_a_column_and_a_plot_each() -> None:
    two = {
        "netD": build.difference(1.2, 1.1, spread=0.1, margin=0.1),
        "netG": build.difference(0.7, 0.6, spread=0.1, margin=0.1),
    }
    rows = [row.model_copy(update={"loss": None, "losses": two}) for row in build.compare_rows()]
    losses = [Loss(name="netD", steps=[1, 3], values=[1.5, 1.25]), Loss(name="netG", steps=[2, 4], values=[0.5, NAN])]
    runs = [build.run_record("fp32", steps=Steps(loss=[1.5, 0.5, 1.25, NAN], losses=losses))]
    record = build.compare_record(rows=rows, runs=runs)
    page = page_of(record)
    table = verdicts(record)
    assert [head.split("\n")[0] for head in table.heads[4:6]] == ["final loss of netD", "final loss of netG"]
    assert [loss.text for loss in table.rows[1][4:6] if isinstance(loss, Cell)] == ["1.2", "0.7"]
    assert page.grid("Every run").rows[0][3] == "netD 1.25, netG NaN"
    charts = [c for c in compare.charts(record) if isinstance(c, Chart) and c.name.startswith("loss")]
    assert [(c.name, c.title, c.y_axis.title) for c in charts] == [
        ("loss1", "Loss of netD", "loss of netD"),
        ("loss2", "Loss of netG", "loss of netG"),
    ]
    assert [(c.x, c.lines[0].y[0]) for c in charts] == [([1, 3], 1.5), ([2, 4], 0.5)]
    assert [(mark.x, mark.text) for mark in charts[1].lines[0].marks] == [(4, "seed 0: NaN at step 4")]
    assert "final loss of netG" in render_html(record)
    assert "netG" in rendered(record)


@pytest.mark.parametrize(
    ("scale", "difference", "shown"),
    [
        ("ratio", 0.0312, "+3.1%"),
        ("ratio", -0.2, "-20%"),
        ("ratio", 0.0, "0%"),
        ("ratio", 2.5, "3.50x"),
        ("ratio", -0.75, "0.250x"),
        ("ratio", 1.7e9, "1.7e+09x"),
        ("proportion", -0.0028, "-0.0028"),
        ("absolute", 12.0, "+12"),
    ],
)
def test_a_difference_is_shown_on_its_scale(scale: ScaleName, difference: float, shown: str) -> None:
    values = {"value": 1.0, "baseline": 1.0, "margin": 0.02, "low": difference, "high": difference}
    compared = compare._compared(Difference(scale=scale, difference=difference, **values), alone=False)
    assert compared.below == (shown, f"{shown} to {shown}")


def test_single_seed_has_no_interval() -> None:
    rows = build.compare_rows()
    assert rows[1].loss is not None
    loss = rows[1].loss.model_copy(update={"low": NAN, "high": NAN})
    rows[1] = rows[1].model_copy(update={"loss": loss})
    loss_cell = verdicts(build.compare_record(rows=rows)).rows[1][4]
    assert isinstance(loss_cell, Cell)
    assert loss_cell.below[1] == "no interval"


def test_comparison_without_rows_or_runs_is_shown() -> None:
    record = build.compare_record(rows=[], runs=[])
    assert page_of(record).answer.sentence.startswith("Only the baseline ran")
    assert "Only the baseline ran" in render_html(record)
    assert "Only the baseline ran" in rendered(record)


def test_a_run_word_for_word() -> None:
    page = page_of(build.run_record())
    assert page.answer.sentence == "train.py trained 200 steps under fp16, to a loss of 0.3677"
    assert [(f.what, f.value) for f in page.answer.facts] == [
        ("formats", "fp16 97.3%, fp32 2.7%"),
        ("final loss", "0.3677"),
        ("accuracy", "0.91"),
        ("skipped steps", "3"),
        ("time per step", "25.7 ms"),
        ("memory", "1.99 GiB"),
    ]
    formats = [
        block for one in page.sections if isinstance(one, Section) for block in one.blocks if isinstance(block, Formats)
    ]
    assert [(s.format, s.text) for s in formats[0].policies[0].shares] == [("fp16", "97.3%"), ("fp32", "2.7%")]


@pytest.mark.parametrize(
    ("fields", "headline", "error"),
    [
        ({"error": "out of memory"}, "train.py failed under fp16 after 200 steps", "out of memory"),
        ({"error": "no", "hint": "try it"}, "train.py failed under fp16 after 200 steps", "no\nhint: try it"),
        (
            {"exit_code": 3},
            "train.py failed under fp16 after 200 steps",
            "the script ended with exit code 3",
        ),
        ({"steps": Steps()}, "train.py ran under fp16; no training step was seen", ""),
    ],
)
def test_run_that_did_not_train(fields: dict[str, object], headline: str, error: str) -> None:
    page = page_of(build.run_record(**fields))
    assert (page.answer.sentence, page.answer.error) == (headline, error)


@pytest.mark.parametrize(
    ("fields", "headline"),
    [
        ({}, "train.py trained 200 steps under fp16, to a loss of 0.3677"),
        ({"error": "no"}, "train.py failed under fp16 after 200 steps"),
        ({"steps": Steps()}, "train.py ran under fp16; no training step was seen"),
    ],
)
def test_the_headline_says_that_a_graph_replayed_steps(fields: dict[str, object], headline: str) -> None:
    effective = Effective(flops_by_format={"fp16": 1}, num_replays=100)
    page = page_of(build.run_record(effective=effective, **fields))
    assert page.answer.sentence == f"{headline}; 100 replays of a CUDA graph are not recorded"


def test_memory_lines_share_their_kinds_and_never_show_zeros_for_no_measurement() -> None:
    measured = Memory(parameters_bytes=1024, gradients_bytes=1024, optimizer_bytes=0, activations_bytes=512)
    part = Memory(parameters_bytes=1024, optimizer_bytes=0, cuda_allocated_bytes=2048)
    (table,) = pages.memory_section([("fp32", measured), ("bf16", part), ("fp16", Memory())]).blocks
    assert isinstance(table, Grid)
    assert [list(row[1:]) for row in table.rows] == [
        ["1.00 KiB", "1.00 KiB", "0 B", "512 B", "unknown", "2.50 KiB"],
        ["1.00 KiB", "unknown", "0 B", "unknown", "2.00 KiB", "unknown"],
        ["unknown"] * 6,
    ]


def test_what_a_machine_can_do() -> None:
    page = page_of(build.doctor_record())
    assert page.answer.sentence == "NVIDIA H100 80GB HBM3 computes natively in fp16"
    titles = [one.title for one in page.sections if isinstance(one, Section)]
    assert titles[1].endswith(" (cuda, compute capability 9.0, 80.0 GiB)")
    levels = [(f.value, f.tone) for f in page.facts(titles[0])]
    assert levels == [("native", "good"), ("emulated", "warn"), ("impossible", "bad")]


def test_emulated_rows_never_show_a_speed() -> None:
    record = build.emulated_record()
    steps = [row[2] for row in verdicts(record).rows[1:]]
    assert [step.below for step in steps if isinstance(step, Cell)] == [("emulated", "")] * 3
    for shown in (rendered(record), render_html(record)):
        assert not re.search(r"9\.8\d?x", shown)


# The terminal


def test_text_of_a_comparison_fits_100_columns() -> None:
    shown = rendered(build.compare_record())
    assert max(map(len, shown.splitlines())) <= 100
    table = """\
                                           final loss            accuracy
                        step   memory      difference          difference
policy    verdict   speed-up    ratio    95% interval        95% interval skips final scale"""
    assert [line.split() for line in table.splitlines()] == [line.split() for line in shown.splitlines()[4:7]]
    for words in (
        "bf16 trains like fp32, 1.61x as fast (1.57x to 1.66x).",
        "-0.0039 to +0.0065",
        "1.57x to 1.66x",
        "97.3% bf16, 2.7% fp32",
    ):
        assert words in shown
    note = "Step: median after the first ones. Speed-up: ratio of two steps. Final loss: mean of the last tenth of the steps."
    assert note in " ".join(shown.split())


def test_policies_have_the_colours_of_their_formats_in_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(build.compare_record(num_steps=10), path)
    # A process of its own: rich keeps a style's codes for the first terminal that it drew the style on.
    wanted = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": "100"}
    surroundings = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | wanted
    command = [sys.executable, "-m", "mezzo", "report", str(path)]
    shown = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout
    for policy in ("fp32", "bf16", "fp16", "fp16-pure"):
        colour = policy_style(policy).terminal
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        # Verdicts, reasons, memory and effective formats: a table each, its cells padded in the same colour.
        assert len(re.findall(rf"\x1b\[38;2;{red};{green};{blue}m{policy} *\x1b\[0m", shown)) == 4, policy


def test_text_of_a_run() -> None:
    shown = rendered(build.run_record(error="the loss was NaN", environment=build.environment()))
    assert shown.splitlines()[:6] == [
        "train.py failed under fp16 after 200 steps",
        "error: the loss was NaN",
        "",
        "  formats        fp16 97.3%, fp32 2.7%  of the FLOPs of matrix products",
        "  final loss     0.3677                 after 200 steps",
        "  accuracy       0.91",
    ]
    assert "encoder.attention.flash_attn" in shown
    assert shown.endswith("Reproduce\n  mezzo run --policy fp16 train.py --epochs 3")


def test_text_of_a_machine() -> None:
    shown = rendered(build.doctor_record())
    expected = """\
NVIDIA H100 80GB HBM3 computes natively in fp16

AMD EPYC 9554 (cpu)
  format   level        reason
 ────────────────────────────────────────────────────────────────
  fp32     native       every device computes in it
  fp16     emulated     the CPU has neither avx512_fp16 nor amx_fp16
  e4m3     impossible   no rule for it on this device
"""
    assert [line.split() for line in shown.splitlines()[:8] if "\u2500" not in line] == [
        line.split() for line in expected.splitlines() if "\u2500" not in line
    ]
    assert "torch's default is 'highest'" in shown


def test_text_shows_markup_as_it_is_written() -> None:
    shown = rendered(build.run_record(policy="[bold]x[/bold]\x1b[31m"))
    assert "[bold]x[/bold]\ufffd[31m" in shown
    assert "\x1b" not in shown


NOTE = "Share of the floating-point operations of matrix products and convolutions, counted"
EMULATED = "lower formats were emulated (rounded to the format, multiplied in a wider one): times say nothing about a speed-up."


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ({}, "No matrix product or convolution was counted."),
        ({"fp32": ("fp32", False, 2), "bf16": ("bf16", False, 2)}, f"{NOTE} on step 2."),
        ({"fp32": ("fp32", False, 2), "fp16": ("fp16", True, 2)}, f"{NOTE} on step 2. The {EMULATED}"),
        ({"fp32": ("fp32", False, 2), "fp16": ("fp16", True, 3)}, f"{NOTE}. The {EMULATED}"),
        ({"bf16": ("bf16", False, 2), "fp16": ("fp16", True, 2)}, f"{NOTE} on step 2. Under fp16 the {EMULATED}"),
        (
            {"fp32:reduce=bf16:world=8": ("fp32", True, 2)},
            f"{NOTE} on step 2. Under fp32:reduce=bf16:world=8 reductions over processes were emulated: times say nothing about a "
            "speed-up.",
        ),
    ],
)
def test_the_note_below_shares_names_the_policies_that_were_emulated(
    formats: dict[str, tuple[str, bool, int]], expected: str
) -> None:
    runs = [
        run(policy, [1.0], effective=Effective(flops_by_format={name: 8}, emulated=emulated, counted_on_step=step))
        for policy, (name, emulated, step) in formats.items()
    ]
    assert pages.shares_note(*runs) == expected


def test_every_kind_of_record_has_a_page_and_no_template_is_for_one() -> None:
    kinds = {kind.model_fields["kind"].default for kind in get_args(get_args(Record)[0])}
    assert {kind for kind in kinds if (REPORT.parent / "commands" / kind / "page.py").is_file()} == kinds
    assert {path.stem for path in (REPORT / "templates").glob("*.html")} == {"base", "parts", "page", "index"}
