"""Programs of one GPU that are tried without one: kernels from a trace, joined with a tape; predictions stored before they are measured."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
from benchmarks.gpu import host_by_operation, measure_kernels, measure_zoo
from benchmarks.gpu.measure_kernels import kind_of, rows_of, write_trace
from benchmarks.gpu.measure_zoo import Case
from benchmarks.prediction import article_numbers, predict_kernels, predict_zoo
from benchmarks.prediction import rows as predict_rows
from benchmarks.prediction.predict_kernels import Call, joined, measured_calls, parts_of, predicted_calls
from benchmarks.shared import csv_rows

from mezzo.gpus import GPUS
from mezzo.measure.predict.tape import CostedOperation, ProductSize
from mezzo.measure.predict.time import Card, Columns, Constants, operation_bounds

RESULTS = ROOT / "benchmarks" / "results" / "h100"
MARK = "the step whose kernels count"


def _event(cat: str, name: str, at: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": dur, "tid": tid, "args": args}


def _launched(number: int, name: str, launch: float, begin: float, took: float, tid: int = 1) -> list[dict[str, Any]]:
    return [
        _event("cuda_runtime", "cudaLaunchKernel", launch, 1, tid, correlation=number),
        _event("kernel", name, begin, took, 7, correlation=number),
    ]


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "no category", "ts": 0, "dur": 1},
        _event("cpu_op", "aten::mm", 10, 10),
        *_launched(1, "of the step before", 12, 20, 5),
        _event("user_annotation", MARK, 100, 400),
        _event("gpu_user_annotation", MARK, 100, 400),
        # forward: a convolution whose inner operation copies, then one that no table knows
        _event("cpu_op", "aten::conv2d", 110, 40),
        _event("cpu_op", "aten::convolution", 112, 36, **{"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3]], "Input type": ["float", "float"]}),
        _event("cpu_op", "aten::copy_", 115, 5),
        *_launched(2, "nchwToNhwc", 116, 300, 7),
        *_launched(3, "implicit_gemm", 130, 308, 20),
        _event("cpu_op", "aten::outer", 160, 20),
        _event("cpu_op", "aten::unheard_of", 161, 10),
        *_launched(4, "unheard", 165, 330, 2),
        # backward: another thread
        _event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 200, 50, 2),
        _event("cpu_op", "aten::mm", 210, 20, 2),
        *_launched(5, "gemm", 212, 340, 30, 2),
        _event("cpu_op", "aten::mm", 240, 5, 2),
        *_launched(6, "gemm", 241, 370, 31, 2),
        _event("user_annotation", "Optimizer.step#AdamW.step", 400, 50),
        _event("cpu_op", "aten::_foreach_mul_", 410, 10),
        *_launched(7, "multi_tensor_apply", 412, 430, 9),
        _event("gpu_memset", "Memset", 470, 1, 7, correlation=8),
        _event("cuda_driver", "cuMemsetAsync", 460, 1, correlation=8),
        _event("cuda_runtime", "cudaEventRecord", 461, 1),
        *_launched(9, "of the step after", 501, 510, 5),
    ]
}  # fmt: skip


def test_kernels_of_the_marked_step_with_the_operations_that_launched_them() -> None:
    found = [
        (k.place, k.phase, k.kind, k.operation, k.kernel, k.launched_us, k.began_us, k.took_us) for k in rows_of(TRACE)
    ]
    assert found == [
        (0, "forward", "convolution", "convolution", "nchwToNhwc", 16, 200, 7),
        (0, "forward", "convolution", "convolution", "implicit_gemm", 30, 208, 20),
        (1, "forward", "other", "unheard_of", "unheard", 65, 230, 2),
        (2, "backward", "product", "mm", "gemm", 112, 240, 30),
        (3, "backward", "product", "mm", "gemm", 141, 270, 31),
        (4, "optimizer", "optimizer", "_foreach_mul_", "multi_tensor_apply", 312, 330, 9),
        (5, "forward", "other", "", "Memset", 360, 370, 1),
    ]  # fmt: skip
    first = rows_of(TRACE)[0]
    assert (first.shapes, first.formats) == ("[[2,3,8,8],[4,3,3,3]]", "float float")


def test_a_trace_without_its_step_is_refused() -> None:
    with pytest.raises(ValueError, match="0 marked steps instead of one"):
        rows_of({"traceEvents": []})


def test_torch_names_phases_and_operations_as_the_rows_expect(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, 3, 3)).sum().backward()
        optimizer.step()

    write_trace(step, "cpu", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    # A CPU launches no kernels: each operation gets one, at its middle, as a GPU's would be launched.
    own = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
    for number, event in enumerate(own):
        at = event["ts"] + event["dur"] / 2
        trace["traceEvents"] += _launched(number, event["name"], at, at + 5, 1.0, event["tid"])
    found = {(kernel.phase, kernel.kind, kernel.operation) for kernel in rows_of(trace)}
    assert {
        ("forward", "convolution", "convolution"),
        ("forward", "product", "addmm"),
        ("backward", "convolution", "convolution_backward"),
        ("backward", "product", "mm"),
        ("optimizer", "optimizer", "lerp_"),
    } <= found


@pytest.mark.parametrize(
    ("operation", "phase", "kind"),
    [
        ("convolution_weight_gradient", "backward", "convolution"),
        ("cudnn_batch_norm_backward", "backward", "batch norm"),
        ("_scaled_dot_product_flash_attention_backward", "backward", "attention"),
        ("mm", "optimizer", "optimizer"),
        ("unheard_of", "forward", "other"),
    ],
)
def test_kinds(operation: str, phase: str, kind: str) -> None:
    assert kind_of(operation, phase) == kind


def _operation(name: str, phase: str = "backward", module: str = "a") -> CostedOperation:
    return CostedOperation(name, phase, module, "fp32", 10, 3, 4, ProductSize())  # type: ignore[arg-type]


def test_a_convolutions_gradients_are_one_call_and_are_joined_with_the_measured_one() -> None:
    tape = [
        _operation("convolution", "forward"),
        _operation("convolution_input_gradient"),
        _operation("convolution_weight_gradient"),
        _operation("sum"),
        _operation("sum", module="b"),
        _operation("convolution_weight_gradient", module="b"),
    ]
    priced = predicted_calls(tape, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6])
    assert [(call.kind, call.us, call.num_kernels, call.flops, call.moved_bytes) for call in priced] == [
        ("convolution", 1, 1, 10, 7),
        ("convolution", 9, 3, 30, 21),
        ("reduction", 5, 1, 10, 7),
        ("convolution", 6, 1, 10, 7),
    ]
    own = measured_calls(rows_of(TRACE))
    assert [(call.phase, call.kind, call.us, call.num_kernels) for call in own[:2]] == [
        ("forward", "convolution", 27, 2),
        ("forward", "other", 2, 1),
    ]
    pairs = joined(own, priced, "convolution")  # the backward pass has two calls against none
    assert [(a.us, b.us) for a, b in pairs] == [(27, 1)]
    parts = {(p.phase, p.kind): p for p in parts_of(measure_kernels.CASES[0], own, priced)}
    assert parts["forward", "convolution"].measured_ms == pytest.approx(0.027)
    assert parts["backward", "convolution"].predicted_ms == pytest.approx(0.015)
    assert parts["backward", "product"].measured_ms == pytest.approx(0.061)
    assert parts["backward", "product"].kernels == 2


def test_what_was_measured_is_written_and_read_again(tmp_path: Path) -> None:
    case, kernels = measure_kernels.CASES[-1], rows_of(TRACE)
    folder = tmp_path / case.file_name
    folder.mkdir()
    with gzip.open(folder / "trace.json.gz", "wt", encoding="utf-8") as file:
        json.dump(TRACE, file)
    step = measure_kernels.with_kernels(
        measure_kernels.Step(**asdict(case), gpu="a", torch="b", library="c", step_ms=1.5, host_ms=0.5), kernels
    )
    assert (step.num_kernels, step.kernels_ms, step.profiled_ms) == (7, 0.1, 0.171)
    csv_rows.append(folder / "steps.csv", [asdict(step)], list(asdict(step)))
    assert predict_kernels.read(tmp_path) == ([step], {})  # as where no kernels could be read
    assert measure_kernels.write_kernels(case, folder) == kernels
    assert predict_kernels.read(tmp_path) == ([step], {case: kernels})


def test_a_case_with_a_folder_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = measure_zoo.tiny()
    (tmp_path / first.file_name).mkdir()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "steps.csv").write_text("of a case that was cut", encoding="utf-8")
    measure = measure_kernels.measure

    def measured(case: Case, device: str, out: Path) -> measure_kernels.Step:
        if case == others[0]:
            raise RuntimeError("no such kernel")
        return measure(case, device, out)

    monkeypatch.setattr(measure_kernels, "measure", measured)
    words = ["--out", str(tmp_path), "--cases", "tiny", "--device", "cpu", "--seconds", "1e9"]
    assert measure_kernels.main(words) == 1
    assert "RuntimeError: no such kernel" in capsys.readouterr().out
    steps, kernels = predict_kernels.read(tmp_path)
    assert [(step.policy, step.num_kernels) for step in steps] == [(others[1].policy, 0)]  # a CPU launches none
    assert dict(kernels) == {}
    assert list((tmp_path / first.file_name).iterdir()) == []


def test_the_joined_calls_show_rates(capsys: pytest.CaptureFixture[str]) -> None:
    own = Call("forward", "product", "mm", 10.0, shapes="[[1,2],[2,3]]", kernels="gemm 10 us")
    predict_kernels.show([(own, replace(own, us=5.0, flops=2 * 10**9, moved_bytes=3 * 10**7))])
    shown = capsys.readouterr().out
    assert "measured       10 us predicted        5 us   200.0 TFLOP/s   3000 GB/s  [[1,2],[2,3]]  gemm 10 us" in shown
    assert "speed of 1 calls: mean 100.0%" in shown


# --- the lists of cases ---------------------------------------------------------------------------


def test_the_trainings_of_articles_are_those_of_their_figures() -> None:
    assert set(measure_zoo.ARTICLES) == {
        (claim.model, claim.size or 224, claim.batch) for claim in article_numbers.SPEEDS
    }
    policies = {(case.model, case.policy) for case in measure_zoo.articles()}
    assert policies == {
        (model, policy)
        for model, *_ in measure_zoo.ARTICLES
        for policy in ("fp32", "tf32", "fp16", "bf16", "fp16-pure", "bf16-pure")
    }


def test_pure_policies_have_16_bit_weights_gradients_and_moments() -> None:
    for policy, dtype in {"fp32": torch.float32, "bf16": torch.float32, "bf16-pure": torch.bfloat16}.items():
        training = measure_zoo.Training(Case("tiny:convnet", 8, 2, policy), "cpu")
        training.step()
        for weight in training.model.parameters():
            moments = training.optimizer.state[weight]
            assert weight.grad is not None
            assert {weight.dtype, weight.grad.dtype, moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype} == {dtype}


# --- predictions that are stored before they are measured -----------------------------------------


def test_the_predictions_of_the_28_rows_are_those_of_the_table() -> None:
    """Each figure of docs/h100.md, from the stored predictions and the measured rows, by numpy alone."""
    names = [*asdict(measure_zoo.zoo()[0])]
    with (RESULTS / "zoo.csv").open(encoding="utf-8", newline="") as file:
        rows = {tuple(cells[name] for name in names): cells for cells in csv.DictReader(file)}
    with (RESULTS / "zoo_predicted.csv").open(encoding="utf-8", newline="") as file:
        stored = {tuple(cells[name] for name in names): cells for cells in csv.DictReader(file)}
    assert stored.keys() == rows.keys()

    def ratio(key: tuple[str, ...], field: str) -> float:
        return float(stored[key][field]) / float(rows[key][field])

    def shown(ratios: list[float]) -> list[str]:
        errors = 100 * np.abs(np.array(ratios) - 1)
        return [f"{value:.1f}%" for value in (np.median(errors), errors.mean(), np.quantile(errors, 0.9))]

    pairs = [(key, (*key[:3], "fp32", key[4])) for key in rows if key[3] == "bf16" and key[4] == "False"]
    pairs = [(half, wide) for half, wide in pairs if wide in rows]
    found = [shown([ratio(key, f"{what}_bytes") for key in rows]) for what in ("allocated", "reserved", "device")]
    found.append(shown([ratio(a, "allocated_bytes") / ratio(b, "allocated_bytes") for a, b in pairs]))
    found.append(shown([ratio(key, "throughput") for key in rows]))
    found.append(shown([ratio(a, "throughput") / ratio(b, "throughput") for a, b in pairs]))
    page = (ROOT / "docs" / "h100.md").read_text(encoding="utf-8")
    table = page.partition("| predicted | median error | mean | p90 |")[2].partition("\n\n")[0]
    assert [re.findall(r"\d+\.\d%", line) for line in table.splitlines()[2:]] == found


def _stored() -> list[dict[str, str]]:
    with (RESULTS / "holdout_predicted.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_each_case_that_is_held_out_has_a_stored_prediction_and_is_not_among_the_first_rows() -> None:
    with (RESULTS / "zoo.csv").open(encoding="utf-8", newline="") as file:
        seen = {tuple(cells[name] for name in asdict(measure_zoo.zoo()[0])) for cells in csv.DictReader(file)}
    keys = [case.key for case in measure_zoo.holdout()]
    assert len(set(keys)) == len(keys)
    assert not seen & set(keys)
    assert [tuple(cells[name] for name in asdict(measure_zoo.zoo()[0])) for cells in _stored()] == keys
    assert {cells["gpu"] for cells in _stored()} == {"h100-sxm"}
    assert not any(cells["commit"].endswith("-dirty") for cells in _stored())


@pytest.mark.parametrize(
    ("factor", "beside", "summary"),
    [
        (1.0, "stored 10.00 ms: nothing differs", "1 of 2 rows, 0 differ from today's"),
        (1.01, "stored 10.00 ms: throughput differs", "1 of 2 rows, 1 differ from today's"),
    ],
)
def test_stored_predictions_are_compared_with_measured_rows_and_with_todays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    beside: str,
    summary: str,
) -> None:
    stored = {"throughput": 100.0, "allocated_bytes": 10, "reserved_bytes": 20, "device_bytes": 30}
    today = SimpleNamespace(**{**stored, "throughput": 100.0 * factor}, step_ms=10.0 / factor)
    monkeypatch.setattr(predict_zoo, "predicted", lambda cells, gpu: today)
    case = asdict(Case("timm:a", 224, 1, "bf16"))
    other = asdict(Case("timm:b", 224, 1, "bf16"))
    facts = {"status": "ok", "step_ms": 20.0, **stored, "throughput": 50.0}
    rows = [{**one, **facts, "gpu": "NVIDIA H100 80GB HBM3"} for one in (case, other)]
    _write(tmp_path / "rows.csv", rows)
    _write(tmp_path / "rows_predicted.csv", [{**case, **stored, "gpu": "h100-sxm", "step_ms": 10.0, "commit": "abc"}])
    predict_zoo.compare(tmp_path / "rows.csv")
    lines = capsys.readouterr().out.splitlines()
    assert beside in lines[0]
    assert lines[1].endswith("not stored")
    assert f"as predicted at abc: {summary}" in lines
    assert lines.count("throughput: mean 100.0% median 100.0% p90 100.0% bias +100.0% of 1 rows") == (factor != 1.0)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_rows_are_kept_as_they_come_and_no_case_begins_too_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv.gz"
    with pytest.raises(FileNotFoundError):
        list(csv_rows.read(path))
    for number in range(2):
        csv_rows.append(path, [{"case": number, "ms": 1.5}], ["case", "ms"])
    assert list(csv_rows.read(path)) == [{"case": "0", "ms": "1.5"}, {"case": "1", "ms": "1.5"}]
    csv_rows.write(path, [], ["case"])
    assert list(csv_rows.read(path)) == []
    with path.with_suffix("").open("w", encoding="utf-8") as file:
        file.write("case,ms\n0,1.5\n1,")  # cut while it was written
    assert list(csv_rows.continued(path.with_suffix(""))) == [{"case": "0", "ms": "1.5"}]
    assert path.with_suffix("").read_text(encoding="utf-8") == "case,ms\n0,1.5\n"
    assert list(csv_rows.continued(tmp_path / "absent.csv")) == []
    clock = iter([0.0, 0.0, 4.0, 4.0, 10.0, 10.0])  # the first takes 4 s and the second 6: a third may end after 16
    monkeypatch.setattr(csv_rows.time, "monotonic", lambda: next(clock))
    assert list(csv_rows.until(15.0, "abc")) == ["a", "b"]
    assert capsys.readouterr().out == "the time is over before c\n"


def test_the_scripts_that_measure_need_nothing_of_mezzo() -> None:
    """Nor have they a module beside them that does."""
    code = "import sys; sys.modules['mezzo'] = None; from benchmarks.gpu import {}"
    for name in ("measure_zoo", "measure_kernels", "host_by_operation"):
        subprocess.run([sys.executable, "-c", code.format(name)], cwd=ROOT, check=True)


def test_the_host_is_timed_operation_by_operation_and_rows_that_are_there_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("add", "mm")
    monkeypatch.setattr(host_by_operation, "OPERATIONS", {n: host_by_operation.OPERATIONS[n] for n in names})
    path = tmp_path / "operations.csv"
    kept = dict.fromkeys(host_by_operation.NAMES, "1") | {"operation": "mm", "form": "both"}
    csv_rows.append(path, [kept], host_by_operation.NAMES)
    words = ["--out", str(path), "--device", "cpu", "--calls", "1"]
    host_by_operation.main(words)
    host_by_operation.main(words)
    rows = list(csv_rows.read(path))
    assert rows[0] == kept
    forms = [(name, form) for name in names for form in ("plain", "graph", "both", "autocast")]
    updates = [(f"AdamW of 10, {way}", "plain") for way in ("foreach", "fused")]
    assert sorted((row["operation"], row["form"]) for row in rows) == sorted(forms + updates)
    assert all(0 < float(row["us_min"]) <= float(row["us"]) <= float(row["us_max"]) for row in rows[1:])


def test_merged_operations_cost_what_all_of_them_cost() -> None:
    product = CostedOperation("mm", "forward", "", "fp16", 10**9, 10**6, 0, ProductSize(1, 512, 512, 512))
    ops = Columns.of([product, CostedOperation("add", "forward", "", "fp32", 0, 10**6, 0)] * 3)
    merged, counts = predict_rows.merged(ops)
    assert (len(merged.flops), [*counts]) == (2, [3, 3])
    card = Card.of(GPUS["a100-80gb"], tf32=True)
    whole, each = (operation_bounds(columns, card, Constants()).total for columns in (ops, merged))
    assert (counts * each).sum() == pytest.approx(whole.sum())
