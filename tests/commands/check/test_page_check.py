"""A check in the terminal and on its page: the answer's words, the box, and what a page shows first."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mezzo.commands.check.page import policy_title
from mezzo.records import Answer, CheckRecord, Gain, Note
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.terminal import render
from record_builders import check_record, run_record


def answered(**fields: Any) -> CheckRecord:
    record = check_record()
    return record.model_copy(update={"answer": record.answer.model_copy(update=fields)})


def printed(record: CheckRecord, *, width: int = 110) -> str:
    stream = io.StringIO()
    render(record, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("fields", "headline"),
    [
        ({}, "Use BF16"),
        ({"policy": "fp16:init_scale=1024"}, "Use fp16:init_scale=1024"),
        ({"policy": "as-is"}, "Keep train.py's own mixed precision"),
        ({"decision": "stay", "policy": "fp32"}, "Stay in FP32"),
        ({"decision": "stay", "policy": "as-is", "own_formats": ["bf16"]}, "Keep the script's own precision (BF16)"),
        (
            {"decision": "stay", "policy": "as-is", "own_formats": ["fp32", "bf16"]},
            "Keep the script's own precision (FP32 and BF16)",
        ),
        ({"decision": "undecided", "policy": "fp32"}, "Undecided"),
        (
            {"decision": "failed", "policy": "fp32", "own_formats": ["bf16"]},
            "No answer: train.py goes wrong in its own precision (BF16)",
        ),
        ({"decision": "failed", "policy": "fp32"}, "No answer: train.py goes wrong in FP32 itself"),
    ],
)
def test_the_headline_is_the_answer(fields: dict[str, Any], headline: str) -> None:
    assert page_of(answered(**fields)).answer.sentence == headline


def test_a_script_that_never_trained_has_no_answer() -> None:
    record = answered(decision="failed", policy="fp32").model_copy(update={"comparison": None})
    assert page_of(record).answer.sentence == "No answer: train.py did not train"


def test_the_lines_of_the_answer() -> None:
    lines = [(line.what, line.value) for line in page_of(check_record()).answer.boxed][:-1]
    assert lines == [
        ("why", "bf16 trains like fp32."),
        ("accuracy", "kept: the loss differs by +0.0013 (-0.0039 to +0.0065), inside the margin of 0.02; 3 seeds."),
        ("memory", "23% less per step: 1.99 GiB instead of 2.45 GiB (activations 742 MiB instead of 1.18 GiB)"),
        ("speed", "1.61x as fast, measured on NVIDIA H100 80GB HBM3 (1.57x to 1.66x; median step, 3 seeds)."),
        (
            "speed",
            "at most 6.40x over FP32 on A100-SXM4-80GB, by counted FLOPs and bytes (a ceiling, not a prediction): "
            "90% of the FLOPs are in products that it runs faster.",
        ),
        ("changed", "nothing but the precision"),
        ("judged by", "the training loss: no metric was named."),
    ]


def test_a_ceiling_names_tf32_first_where_the_gpu_has_it() -> None:
    record = check_record()
    bounds = [gain for gain in record.answer.gains if gain.kind == "bound"]
    over_tf32 = answered(gains=[bounds[0].model_copy(update={"times_over_tf32": 1.6})])
    lines = {line.what: line.value for line in page_of(over_tf32).answer.boxed}
    assert lines["speed"].startswith(
        "at most 1.60x over TF32, 6.40x over strict FP32 on A100-SXM4-80GB, by counted FLOPs"
    )


@pytest.mark.parametrize("memory_saved", [0.2, None])
def test_the_accuracy_of_an_undecided_policy_is_not_called_kept(memory_saved: float | None) -> None:
    record = check_record()
    assert record.comparison is not None
    open_rows = [
        row.model_copy(update={"verdict": "undecided"}) if row.policy == "bf16" else row
        for row in record.comparison.rows
    ]
    comparison = record.comparison.model_copy(update={"rows": open_rows})
    evidence = next(row.reason for row in open_rows if row.policy == "bf16")
    record = answered(decision="stay", policy="fp32", evidence=evidence, evidence_of="bf16", memory_saved=memory_saved)
    lines = {
        line.what: line.value for line in page_of(record.model_copy(update={"comparison": comparison})).answer.boxed
    }
    assert lines["accuracy"].startswith("not decided: ")
    assert {line.what: line.value for line in page_of(record).answer.boxed}["accuracy"].startswith("kept: ")


@pytest.mark.parametrize(
    ("kind", "over_tf32", "value", "reason"),
    [
        ("bound", 1.6, "at most 1.60x", "over TF32: a ceiling, not a prediction"),
        ("bound", None, "at most 6.40x", "over FP32: a ceiling, not a prediction"),
        ("predicted", 1.6, "1.60x", "over TF32: predicted, not measured"),
        ("predicted", None, "6.40x", "over FP32: predicted, not measured"),
    ],
)
def test_the_figure_beside_the_answer_has_the_baseline_of_its_sentence(
    kind: str, over_tf32: float | None, value: str, reason: str
) -> None:
    gain = next(gain for gain in check_record().answer.gains if gain.kind == "bound")
    record = answered(gains=[gain.model_copy(update={"kind": kind, "times_over_tf32": over_tf32})])
    facts = {fact.what: (fact.value, fact.reason) for fact in page_of(record).answer.facts}
    assert facts["speed on A100-SXM4-80GB"] == (value, reason)


def test_a_spread_around_one_is_no_gain() -> None:
    gain = check_record().answer.gains[0].model_copy(update={"times": 1.04, "low": 0.93, "high": 1.2})
    lines = {line.what: line.value for line in page_of(answered(gains=[gain])).answer.boxed}
    assert (
        lines["speed"]
        == "not measurably faster or slower on NVIDIA H100 80GB HBM3 (0.930x to 1.20x; median step, 3 seeds)."
    )


def test_what_was_changed_is_said() -> None:
    changed = [Note(what="fp16", value="fp16:fp32_modules=head", reason="mezzo diagnose found the fix")]
    lines = {line.what: line.value for line in page_of(answered(changed=changed)).answer.boxed}
    assert lines["changed"] == "mezzo diagnose found the fix: fp16:fp32_modules=head"


def test_a_single_step_is_the_first_step() -> None:
    assert page_of(check_record(first_steps=1)).answer.sentence == "Use BF16 (judged by the first step only)"


def test_verdicts_on_first_steps_are_marked_everywhere() -> None:
    record = check_record(first_steps=20)
    assert record.comparison is not None
    runs = [run.model_copy(update={"first_steps": 20}) for run in record.comparison.runs]
    record = record.model_copy(update={"comparison": record.comparison.model_copy(update={"runs": runs})})
    page = page_of(record)
    assert page.answer.sentence == "Use BF16 (judged by the first 20 steps only)"
    said = "Every run was stopped after the first 20 steps, as requested: the verdicts are on these steps only."
    assert said in render_html(record)
    compared = page_of(record.comparison).grid("Every run")
    assert {row[-1] for row in compared.rows} == {"stopped after the first 20 steps, as requested"}
    assert "trained its first 20 steps under bf16" in printed_run(first_steps=20)


def printed_run(**fields: Any) -> str:
    stream = io.StringIO()
    render(run_record("bf16", num_steps=20, **fields), Console(file=stream, width=110, highlight=False))
    return stream.getvalue()


def test_the_box_is_first_and_names_the_next_command() -> None:
    text = printed(check_record())
    assert text.startswith("╭─ Use BF16 ─")
    assert text.index("╰") < text.index("speed-up")
    assert "│ next       mezzo run --policy bf16 examples/train.py --epochs 3" in text
    assert "trains under it, with the script unedited." in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_long_command_stands_below_the_box_in_one_line() -> None:
    command = "mezzo run --policy bf16 " + "x" * 120
    text = printed(answered(next_command=command), width=80)
    after = text[text.index("╰") :].splitlines()
    assert after[1].strip() == command


def test_the_page_begins_with_the_answer() -> None:
    page = render_html(check_record())
    places = [page.index(part) for part in ("Use BF16", "fp16-pure", "mezzo run --policy bf16", "The comparison")]
    assert places == sorted(places)
    assert page.index("The comparison") < page.index("How it was found") < page.index("Environment")


def test_a_script_decides_neither_terminal_nor_page() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    record = answered(why=hostile, evidence=hostile, next_command=hostile).model_copy(
        update={"script": hostile, "patch": hostile}
    )
    assert "<script>alert" not in render_html(record)
    assert "\x1b[31m" not in printed(record)


@pytest.mark.parametrize(
    ("policy", "title"), [("bf16", "BF16"), ("fp16-master", "fp16-master"), ("fp16:init_scale=2", "fp16:init_scale=2")]
)
def test_policies_in_headlines(policy: str, title: str) -> None:
    assert policy_title(policy) == title


def test_an_answer_needs_no_gain() -> None:
    answer = Answer(
        decision="stay", policy="fp32", why="no other policy was tried", next_command="python a.py", next_why="trains"
    )
    lines = [line.what for line in page_of(check_record(answer=answer, notes=[])).answer.boxed]
    assert lines == ["why"]


def test_a_cpu_that_stays_in_fp32_says_what_is_predicted_for_a_gpu() -> None:
    gain = Gain(kind="predicted", times=1.6, times_over_tf32=0.8, device="A100", note="traced")
    cpu = check_record().device.model_copy(update={"kind": "cpu"})
    record = answered(decision="stay", policy="fp32", gains=[gain]).model_copy(update={"device": cpu})
    assert page_of(record).answer.sentence == "Stay in FP32: 0.800x TF32's speed predicted on A100"
