"""The view of a prediction."""

from __future__ import annotations

import io

from rich.console import Console

import record_builders as build
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.terminal import render


def test_the_largest_batch_is_shown_with_its_headroom_and_each_card_with_its_memory() -> None:
    record = build.predict_record()
    screen = io.StringIO()
    render(record, Console(file=screen, width=110))
    for text in (screen.getvalue(), render_html(record)):
        assert f"largest batch fits into {1 - record.headroom:.0%} of the memory" in " ".join(text.split())
        assert "80.0 GiB" in text  # a100-80gb
        assert "16.0 GiB" in text  # t4


def test_whether_it_fits_is_one_line_a_gpu() -> None:
    gib = 2**30
    facts = build.predict_record().predictions[0]
    large = facts.model_copy(update={"policy": "fp32", "device_bytes": 100 * gib, "fits": False, "largest_batch": 0})
    small = facts.model_copy(update={"gpu": "t4", "gpu_bytes": 16 * gib, "device_bytes": 20 * gib, "fits": False})
    unsized = small.model_copy(update={"gpu": "l4", "gpu_bytes": 26 * gib, "fits": True, "largest_batch": None})
    record = build.predict_record(
        predictions=[large, facts, small, unsized], no_other_batch="nothing sets the size; write {batch}"
    )
    assert [(one.what, one.value, one.reason) for one in page_of(record).facts("Does it fit?")] == [
        (
            "a100-80gb (80.0 GiB)",
            "fits under some",
            "fp32 100 GiB, 25% over, batch up to 0; bf16 13.0 GiB, 84% free, batch up to 1480",
        ),
        ("t4 (16.0 GiB)", "does not fit", "bf16 20.0 GiB, 25% over, batch up to 1480"),
        ("l4 (26.0 GiB)", "fits", "bf16 20.0 GiB, 23% free"),
        ("largest batch", "not known", "nothing sets the size; write {batch}"),
    ]


def test_the_band_is_explained_for_what_was_predicted() -> None:
    gpus = build.predict_record()
    here = [one.model_copy(update={"gpu": "cpu"}) for one in gpus.predictions]
    assert "The band contains 8 of 10 measured trainings on GPU architectures" in page_of(gpus).answer.detail
    cpu = page_of(gpus.model_copy(update={"predictions": here})).answer.detail
    assert "the trainings that calibrated this machine; no largest batch" in cpu
    assert "GPU" not in cpu


def test_the_figures_beside_the_answer_say_whether_it_fits() -> None:
    facts = build.predict_record().predictions[0]
    record = build.predict_record(predictions=[facts])
    chips = {one.what: one.reason for one in page_of(record).answer.facts}
    assert chips["memory, device"] == "fits: 84% of 80.0 GiB stays free"


def test_a_prediction_leads_to_the_check_for_its_fastest_gpu() -> None:
    words = ["mezzo", "predict", "--batch", "256", "--gpus", "t4", "train.py", "--size", "{batch}"]
    record = build.predict_record(model="train.py", command=words)
    step, *_ = page_of(record).steps
    assert step.command == "mezzo check --gpu a100-80gb train.py --size 256"
    assert page_of(build.predict_record()).steps == [], "a model by name is no script"
