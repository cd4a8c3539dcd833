"""The view of a prediction."""

from __future__ import annotations

import io

from rich.console import Console

import record_builders as build
from mezzo.commands.predict.page import verdict_text
from mezzo.records import DataSet, LoaderRate, PredictRecord
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
    assert "Each band contains 8 of 10 measured trainings on GPU architectures" in page_of(gpus).answer.detail
    cpu = page_of(gpus.model_copy(update={"predictions": here})).answer.detail
    assert "the trainings that calibrated this machine; no largest batch" in cpu
    assert "GPU" not in cpu


def test_the_page_says_what_a_gpu_waits_for() -> None:
    one = build.predict_record().predictions[0]
    loader = LoaderRate(samples_per_s=900.0, workers=4, batches=30)
    row = one.model_copy(update={"slower": "loader", "largest_batch": 60_000, "largest_limit": "data set"})
    record = build.predict_record(predictions=[row], loader=loader, data=DataSet(samples=60_000))
    page = page_of(record)
    assert page.answer.sentence.endswith(
        "about 2470 images/s if the loader keeps up, which delivers 900 on this machine"
    )
    assert record.summary.endswith("images/s on a100-80gb in bf16 if its loader keeps up (900 here)")
    facts = {fact.what: (fact.value, fact.reason) for fact in page.answer.facts}
    assert facts["loader"] == ("900 images/s", "it limits: on this machine, 4 workers")
    assert facts["largest batch"] == ("60,000 (all)", "all samples of the data set")
    text = " ".join(shown(record).split())
    assert "Bound by loader: the script's loader delivers 900 images/s on this machine with 4 workers" in text
    assert "(all): the batch is limited to the data set of 60,000 samples, not by memory." in text
    assert "60,000 (all) 3.80x loader" in text


def test_a_loader_that_never_finished_is_a_bound() -> None:
    one = build.predict_record().predictions[0]
    loader = LoaderRate(samples_per_s=0.8, is_bound=True)
    record = build.predict_record(predictions=[one.model_copy(update={"slower": "loader"})], loader=loader)
    assert "if the loader keeps up, which delivers less than 0.800 on this machine" in page_of(record).answer.sentence
    assert record.summary.endswith("if its loader keeps up (less than 0.8 here)")


def test_a_loader_that_keeps_up_or_was_not_timed_is_said_too() -> None:
    fast = build.predict_record(loader=LoaderRate(samples_per_s=9e4, batches=30))
    facts = {fact.what: (fact.value, fact.reason) for fact in page_of(fast).answer.facts}
    assert facts["loader"] == ("90,000 images/s", "on this machine, no workers")
    assert "Bound by loader" not in shown(fast)
    untimed = build.predict_record(loader=LoaderRate(reason="a pass has no second batch"))
    assert "The script's loader was not timed: a pass has no second batch." in shown(untimed)


def test_largest_batches_beyond_measurements_and_copies_are_marked() -> None:
    one = build.predict_record().predictions[0]
    limit = {"largest_batch": 2560, "largest_limit": "measured", "slower": "copies"}
    record = build.predict_record(predictions=[one.model_copy(update=limit)])
    page, text = page_of(record), " ".join(shown(record).split())
    assert page.answer.sentence.endswith("if its inputs are on the GPU already")
    assert "over 2560 3.80x copies" in text
    assert "over: larger batches fit as well, but no measurement that predictions were compared with has one." in text


def test_a_batch_above_the_data_set_is_marked() -> None:
    record = build.predict_record(data=DataSet(samples=100))
    assert "Batch 256 is more than the data set has: the loader yields 100 samples at most." in " ".join(
        shown(record).split()
    )


def test_each_row_has_its_own_band() -> None:
    one = build.predict_record().predictions[0]
    other = one.model_copy(update={"policy": "fp16", "throughput_low": 2000.0, "throughput_high": 2500.0})
    text = " ".join(shown(build.predict_record(predictions=[one, other])).split())
    assert "1980 to 2900" in text
    assert "2000 to 2500" in text


def test_a_calibrated_cpu_leads_to_a_check_here_and_is_not_called_unchecked() -> None:
    one = build.predict_record().predictions[0]
    own = one.model_copy(update={"gpu": "cpu", "policy": "fp32", "validated": False, "calibrated": True})
    record = build.predict_record(
        predictions=[own], command=["mezzo", "predict", "--gpus", "cpu", "train.py"], model="train.py"
    )
    (step, *_) = page_of(record).steps
    assert (step.why, step.command) == (
        "see which policy trains like fp32, answered for this machine",
        "mezzo check train.py",
    )
    assert "Not validated" not in shown(record)


def test_rows_that_no_measurement_vouches_for_are_listed_by_reason() -> None:
    one = build.predict_record().predictions[0]
    bound = one.model_copy(update={"validated": False, "not_validated": "host"})
    unknown = one.model_copy(update={"gpu": "l4", "validated": False, "not_validated": "measurements"})
    own = bound.model_copy(update={"gpu": "t4", "calibrated": True})
    text = " ".join(shown(build.predict_record(predictions=[bound, one, unknown, own])).split())
    assert "Not validated, as no measured step is bound by the host: a100-80gb in bf16 and t4 in bf16." in text
    assert "Not validated, for want of measurements: l4 in bf16." in text
    assert verdict_text(own).endswith("its calibration. Not validated, as no measured step is bound by the host.")


def shown(record: PredictRecord) -> str:
    screen = io.StringIO()
    render(record, Console(file=screen, width=140))
    return screen.getvalue()


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
