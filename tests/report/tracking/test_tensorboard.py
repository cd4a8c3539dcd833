"""Records as TensorBoard's files, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mezzo import cli
from mezzo.records import AnyRecord, DiagnoseRecord, Histogram, KindRange, RangesRecord, TrendStep, write_record
from mezzo.report.log_entries import log_entry
from mezzo.report.tracking import TrackedRecord, tensorboard
from record_builders import compare_record, doctor_record, run_record

pytest.importorskip("tensorboard")
pytestmark = [  # protobuf's and tensorboard's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:tensorboard"),
]


def read(folder: Path) -> Any:
    """Return TensorBoard's view of the event files in ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def write_events(record: AnyRecord, folder: Path) -> Path:
    """Log ``record`` as for a command whose record is in a folder named ``first``; return the folder of the events."""
    job = TrackedRecord(record=folder / "first" / "record.json", page=folder / "first" / "report.html")
    said = tensorboard.send(log_entry(record), job, str(folder / "events"))
    assert said.endswith(f"; to see it: tensorboard --logdir {folder / 'events'}")
    return Path(said.partition(";")[0])


def scalars(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def text(events: Any, name: str = "report") -> str:
    (event,) = events.Tensors(f"{name}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_a_run_is_curves_and_its_report(tmp_path: Path) -> None:
    record = run_record("fp16", num_steps=20)
    events = read(write_events(record, tmp_path))
    for column in ("loss", "loss_scale", "grad_norm", "time_ms"):
        expected = [
            (n, pytest.approx(v, rel=1e-6, nan_ok=True)) for n, v in enumerate(getattr(record.steps, column), 1)
        ]
        assert scalars(events, f"step/{column}") == expected
    assert [v for _, v in scalars(events, "step/skipped")] == [float(s) for s in record.steps.skipped]
    assert scalars(events, "memory/parameters_bytes") == [(0, float(record.memory.parameters_bytes))]
    assert scalars(events, "share_of_flops/fp16") == [(0, pytest.approx(0.973, rel=1e-6))]
    assert record.metric is not None
    assert scalars(events, f"metric/{record.metric.name}") == [
        (step, pytest.approx(value, rel=1e-6))
        for step, value in zip(record.metric.steps, record.metric.values, strict=True)
    ]
    assert "train.py" in text(events)
    assert "Effective formats" in text(events)


def test_a_comparison_is_a_folder_a_run(tmp_path: Path) -> None:
    record = compare_record(num_seeds=2, num_steps=20)
    folder = write_events(record, tmp_path)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == sorted(
        f"{policy}-seed{seed}" for policy in ("fp32", "bf16", "fp16", "fp16-pure") for seed in (0, 1)
    )
    events = read(folder)
    assert "equivalent" in text(events)
    assert "| bf16 | equivalent |" in text(events, "verdicts")
    assert "| verdict fp16 | undecided |" in text(events, "settings")
    assert scalars(events, "speedup/bf16") == [(0, pytest.approx(record.rows[1].speedup, rel=1e-6))]
    run = next(r for r in record.runs if (r.policy, r.seed) == ("bf16", 1))
    assert scalars(read(folder / "bf16-seed1"), "step/loss")[0] == (1, pytest.approx(run.steps.loss[0], rel=1e-6))


def test_a_diagnosis_is_its_trend(tmp_path: Path) -> None:
    trend = [
        TrendStep(step=7, loss=1.5, grad_norm=2.0, loss_scale=512.0),
        TrendStep(step=8, loss=1.25, grad_norm=float("inf"), loss_scale=256.0, skipped=True),
    ]
    record = DiagnoseRecord(run=run_record(num_steps=5), verdict="scale_overflow", trend=trend)
    events = read(write_events(record, tmp_path))
    assert "| verdict | scale_overflow |" in text(events, "settings")
    assert scalars(events, "step/grad_norm") == [(7, 2.0), (8, float("inf"))]
    assert scalars(events, "step/loss_scale") == [(7, 512.0), (8, 256.0)]
    assert scalars(events, "step/skipped") == [(7, 0.0), (8, 1.0)]


def test_ranges_are_histograms_over_exponents(tmp_path: Path) -> None:
    histogram = Histogram(first_exponent=-3, counts=[5, 0, 7], zeros=2)
    kind = KindRange(kind="weight gradients", num_tensors=1, histogram=histogram, casts=[])
    empty = KindRange(kind="updates", num_tensors=0, histogram=Histogram(), casts=[])
    folder = write_events(
        RangesRecord(
            run=run_record(num_steps=5), policy="fp16", format="fp16", first_scale=0, little=0.01, kinds=[kind, empty]
        ),
        tmp_path,
    )
    events = read(folder)
    assert events.Tags()["histograms"] == ["exponents/weight gradients"]
    (event,) = events.Histograms("exponents/weight gradients")
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (-3.0, 0.0, 12.0, -22.0, 52.0)
    assert list(value.bucket_limit) == [-2.0, -1.0, 0.0]
    assert list(value.bucket) == [5.0, 0.0, 7.0]


def test_commands_in_one_folder_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(doctor_record(), tmp_path / "a" / "record.json")
    write_record(run_record(num_steps=5), tmp_path / "b" / "record.json")
    one, two = str(tmp_path / "a" / "record.json"), str(tmp_path / "b" / "record.json")
    place = tmp_path / "events"
    assert cli.main(["report", one, two, "--log-to", f"tensorboard:{place}"]) == 0
    assert cli.main(["report", two, "--log-to", f"tensorboard:{place}"]) == 0
    assert sorted(path.name for path in place.iterdir()) == ["a", "b", "b-2"]
    assert "Environment" in text(read(place / "a"))
    assert len(scalars(read(place / "b"), "step/loss")) == 5
    assert (
        f"mezzo: logged to tensorboard: {place}/b-2; to see it: tensorboard --logdir {place}" in capsys.readouterr().err
    )


def test_without_a_place_events_lie_beside_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a" / "record.json"
    write_record(doctor_record(), path)
    assert cli.main(["report", str(path), "--log-to", "tensorboard"]) == 0
    assert "Environment" in text(read(tmp_path / "a" / "tensorboard"))
