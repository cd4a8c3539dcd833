"""Records in Weights & Biases, offline; the transaction logs that wandb sync would upload are read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import record_builders as build
from mezzo import cli
from mezzo.records import DiagnoseRecord, Histogram, KindRange, RangesRecord, TrendStep, write_record

pytest.importorskip("wandb")

_BLOCK, _HEADER = 32768, 7


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import wandb

    wandb.teardown()  # it reads the environment once a process, and another test has had it read its own
    for name in ("WANDB_PROJECT", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    wandb.teardown()


def chunks(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, as wandb writes it: blocks of 32 KiB, records in parts with a header of 7 bytes."""
    position, kept = _HEADER, b""  # the file has a header of its own
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        kept += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield kept
            kept = b""


def read(path: Path) -> dict[str, Any]:
    """Return what one offline run logged: name, group, project, tags, config, history and summary."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"history": [], "summary": {}, "artifacts": []}
    for chunk in chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        if record.HasField("run"):
            run = record.run
            config = {item.key: json.loads(item.value_json) for item in run.config.update}
            named = {"name": run.display_name, "group": run.run_group, "project": run.project, "type": run.job_type}
            found |= {**named, "tags": list(run.tags), "config": config}
        elif record.HasField("history"):
            items = record.history.item
            found["history"].append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        elif record.HasField("summary"):
            found["summary"] |= {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update
            }
        elif record.HasField("request") and record.request.HasField("log_artifact"):
            found["artifacts"].append(record.request.log_artifact.artifact)
        elif record.HasField("artifact"):
            found["artifacts"].append(record.artifact)
    return found


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    import wandb

    wandb.teardown()  # as at the end of a command: its service may still be writing
    found = [read(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
    return {run["name"]: run for run in found}


def log(record: Any, folder: Path, *, to: str = "wandb") -> int:
    write_record(record, folder / "record.json")
    return cli.main(["report", str(folder / "record.json"), "--log-to", to])


@pytest.mark.slow
def test_a_comparison_is_a_group_of_runs(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = build.compare_record(num_seeds=1, num_steps=4)
    assert log(record, offline / "runs" / "first") == 0
    assert "mezzo: logged to wandb: " in capsys.readouterr().err
    found = runs(offline)
    assert set(found) == {"first", *(f"first/{row.policy}-seed0" for row in record.rows)}
    assert {(run["group"], run["project"]) for run in found.values()} == {("first", "train")}
    whole = found["first"]
    assert whole["type"] == "compare"
    assert "verdict bf16:equivalent" in whole["tags"]
    assert whole["config"]["baseline"] == "fp32"
    assert whole["summary"]["verdict fp16"] == "undecided"
    assert whole["summary"]["speedup/bf16"] == record.rows[1].speedup
    assert whole["summary"]["verdicts/nrows"] == 4
    assert whole["summary"]["report/_type"] == "html-file"
    assert {Path(e.path).name for a in whole["artifacts"] for e in a.manifest.contents} >= {
        "record.json",
        "report.html",
    }
    run = found["first/bf16-seed0"]
    assert run["config"]["policy"] == "bf16"
    own = next(r for r in record.runs if r.policy == "bf16")
    curve = [(row["_step"], row["step/loss"]) for row in run["history"] if "step/loss" in row]
    assert curve == list(enumerate(own.steps.loss, start=1))


@pytest.mark.slow
def test_two_commands_stay_apart_and_the_environment_is_honoured(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    trend = [TrendStep(step=7, loss=1.5, grad_norm=float("inf"), loss_scale=512.0, skipped=True)]
    diagnosis = DiagnoseRecord(run=build.run_record(num_steps=3), verdict="scale_overflow", trend=trend)
    assert log(diagnosis, offline / "runs" / "one") == 0
    assert log(build.doctor_record(), offline / "runs" / "two", to="wandb:theirs") == 0
    found = runs(offline)
    assert {name: run["project"] for name, run in found.items()} == {"one": "ours", "two": "theirs"}
    assert found["one"]["tags"] == ["kind:diagnose", "verdict:scale_overflow"]
    (row,) = (row for row in found["one"]["history"] if "step/loss" in row)
    assert (row["_step"], row["step/loss"], row["step/grad_norm"]) == (7, 1.5, float("inf"))


def test_ranges_are_histograms_over_exponents(offline: Path) -> None:
    histogram = Histogram(first_exponent=-3, counts=[5, 0, 7])
    kind = KindRange(kind="weight gradients", num_tensors=1, histogram=histogram, casts=[])
    ranges = RangesRecord(
        run=build.run_record(num_steps=3), policy="fp16", format="fp16", first_scale=0, little=0.01, kinds=[kind]
    )
    assert log(ranges, offline / "runs" / "one") == 0
    shown, name = runs(offline)["one"]["summary"], "exponents/weight gradients"
    assert (shown[f"{name}/bins"], shown[f"{name}/values"]) == ([-3, -2, -1, 0], [5, 0, 7])


def test_without_a_login_nothing_runs(
    offline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(offline / "none"))
    (offline / "train.py").write_text("open('ran', 'w')\n")
    assert cli.main(["run", "--log-to", "wandb", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "mezzo: --log-to wandb: wandb has no login on this machine\n" in said
    assert "WANDB_MODE=offline" in said
    assert not (offline / "ran").exists()
