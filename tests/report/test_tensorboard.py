"""Records as TensorBoard's files, read back by TensorBoard itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mezzo import cli
from mezzo.records import DiagnoseRecord, Histogram, KindRange, RangesRecord, TrendStep, write_record
from mezzo.report.tensorboard import write_events
from record_builders import compare_record, doctor_record, run_record

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


def scalars(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def text(events: Any) -> str:
    (event,) = events.Tensors("report/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_a_run_is_curves_and_its_report(tmp_path: Path) -> None:
    record = run_record("fp16", num_steps=20)
    write_events(record, tmp_path)
    events = read(tmp_path)
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
    write_events(record, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == sorted(
        f"{policy}-seed{seed}" for policy in ("fp32", "bf16", "fp16", "fp16-pure") for seed in (0, 1)
    )
    assert "equivalent" in text(read(tmp_path))
    run = next(r for r in record.runs if (r.policy, r.seed) == ("bf16", 1))
    assert scalars(read(tmp_path / "bf16-seed1"), "step/loss")[0] == (1, pytest.approx(run.steps.loss[0], rel=1e-6))


def test_a_diagnosis_is_its_trend(tmp_path: Path) -> None:
    trend = [
        TrendStep(step=7, loss=1.5, grad_norm=2.0, loss_scale=512.0),
        TrendStep(step=8, loss=1.25, grad_norm=float("inf"), loss_scale=256.0, skipped=True),
    ]
    write_events(DiagnoseRecord(run=run_record(num_steps=5), verdict="scale_overflow", trend=trend), tmp_path)
    events = read(tmp_path)
    assert scalars(events, "step/grad_norm") == [(7, 2.0), (8, float("inf"))]
    assert scalars(events, "step/loss_scale") == [(7, 512.0), (8, 256.0)]
    assert scalars(events, "step/skipped") == [(7, 0.0), (8, 1.0)]


def test_ranges_are_histograms_over_exponents(tmp_path: Path) -> None:
    histogram = Histogram(first_exponent=-3, counts=[5, 0, 7], zeros=2)
    kind = KindRange(kind="weight gradients", num_tensors=1, histogram=histogram, casts=[])
    empty = KindRange(kind="updates", num_tensors=0, histogram=Histogram(), casts=[])
    write_events(
        RangesRecord(
            run=run_record(num_steps=5), policy="fp16", format="fp16", first_scale=0, little=0.01, kinds=[kind, empty]
        ),
        tmp_path,
    )
    events = read(tmp_path)
    assert events.Tags()["histograms"] == ["exponents/weight gradients"]
    (event,) = events.Histograms("exponents/weight gradients")
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (-3.0, 0.0, 12.0, -22.0, 52.0)
    assert list(value.bucket_limit) == [-2.0, -1.0, 0.0]
    assert list(value.bucket) == [5.0, 0.0, 7.0]


def test_commands_write_what_they_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(doctor_record(), tmp_path / "a" / "record.json")
    write_record(run_record(num_steps=5), tmp_path / "b" / "record.json")
    one, two = str(tmp_path / "a" / "record.json"), str(tmp_path / "b" / "record.json")
    assert cli.main(["report", one, "--tensorboard", str(tmp_path / "alone")]) == 0
    assert "Environment" in text(read(tmp_path / "alone"))
    assert cli.main(["report", one, two, "--tensorboard", str(tmp_path / "both")]) == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["a", "b"]
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboardX" else real(name, *rest)
    )
    assert cli.main(["report", one, "--tensorboard", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()
