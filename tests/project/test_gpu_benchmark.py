"""The GPU benchmark as a program: it runs whole on a CPU with tiny models, keeps its budget, and turns failures into rows."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
from benchmarks.gpu.contest import kernels, timing, worker
from benchmarks.gpu.contest.__main__ import main, supervise
from benchmarks.gpu.contest.cases import LARGE, LOST, POLICIES, SMALL, Case, Way, plan
from benchmarks.gpu.contest.results import Results, markdown
from benchmarks.gpu.contest.timing import TINY, Roofs
from benchmarks.gpu.contest.ways import Contestant, NotHereError, _in_a_graph, build, rewound
from benchmarks.gpu.contest.workloads import workload

from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were
from mezzo.errors import UnsupportedFormatError

LOOP = Way("torch.amp", "fp32")
CASE = Case("case", "training", 1, "tiny_convnet", 4, (LOOP, Way("mezzo", "fp32"), Way("mezzo", "fp16")), LOOP)


# --- the whole program ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("gpu")
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "contest",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)

    assert done.returncode == 0, done.stderr
    (rows,) = out.glob("*.jsonl")
    (page,) = out.glob("*.md")
    found = Results(rows).rows()
    assert page.read_text(encoding="utf-8") == markdown(found)
    assert page.read_text(encoding="utf-8") in done.stdout
    return found


def measured(rows: list[dict[str, Any]], start: str) -> dict[str, dict[str, Any]]:
    return {
        r["way"]: r for r in rows if r["kind"] == "row" and r["case"].startswith(start) and r["status"] == "measured"
    }


@pytest.mark.slow
def test_every_case_is_done_or_says_why_not(run: list[dict[str, Any]]) -> None:
    ended = {row["case"] for row in run if row["kind"] == "end"}
    not_run = {row["case"] for row in run if row.get("status") == "not run"}

    assert ended | not_run == {case.name for case in plan(tiny=True)}
    assert run[0]["kind"] == "environment"
    assert "a test of the program, not a measurement" in run[0]["device"]
    assert run[0]["torch"] == torch.__version__
    assert "--tiny" in run[0]["command"]


@pytest.mark.slow
def test_measured_rows_agree_with_themselves(run: list[dict[str, Any]]) -> None:
    rows = measured(run, "captured tiny_transformer b2")
    reference = rows["torch.amp fp16 eager"]

    assert "mezzo fp16 eager" in rows
    assert (reference["speed_min"], reference["speed_max"]) == (1.0, 1.0)
    for row in rows.values():
        assert row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["rounds"] == len(row["times_ms"]) == TINY.rounds
        assert row["a_second"] == pytest.approx(1e3 / row["ms_median"] * 2 * 8)  # 2 sequences of 8
        assert row["loss"] == pytest.approx(reference["loss"], rel=0.01)
        assert row["loss_steps"] == 3
        assert row["peak_mib"] is None


@pytest.mark.slow
def test_every_policy_trains_alike(run: list[dict[str, Any]]) -> None:
    rows = measured(run, "policy ")
    loops = ("torch.amp fp32", "torch.amp tf32", "torch.amp fp16", "torch.amp bf16")

    assert set(rows) == {f"{way} eager" for way in (*loops, *(f"mezzo {policy}" for policy in POLICIES))}
    assert rows["mezzo fp8 eager"]["against"] == "torch.amp bf16 eager"
    assert rows["mezzo fp16-master eager"]["against"] == "torch.amp fp16 eager"
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) == pytest.approx(min(losses), rel=0.01)
    assert rows["mezzo fp16 eager"]["percent_of_peak"] is None  # emulated: no share of anything
    assert rows["mezzo fp32 eager"]["percent_of_peak"] > 0


@pytest.mark.slow
def test_compiled_ways_train(run: list[dict[str, Any]]) -> None:
    rows = measured(run, "compiled tiny_convnet")

    assert "torch.amp bf16 reduce-overhead" in rows
    assert rows["torch.amp bf16 compiled"]["loss"] == pytest.approx(rows["torch.amp bf16 eager"]["loss"], rel=0.01)


@pytest.mark.slow
def test_what_is_not_here_is_a_row(run: list[dict[str, Any]]) -> None:
    rows = [row for row in run if row["kind"] == "row"]
    captured = [row for row in rows if row.get("way", "").endswith(" captured")]

    assert captured
    assert {row["status"] for row in captured} <= {"failed", "not available"}  # graphs are CUDA's
    assert all(row["why"] for row in captured)
    if importlib.util.find_spec("timm") is None:
        (missing,) = [row for row in rows if row["case"] == "peers mobilenetv3_large b2"]
        assert (missing["status"], missing["why"]) == ("not installed", "No module named 'timm'")


@pytest.mark.slow
def test_the_optimizers_passes_are_shares_of_a_copy(run: list[dict[str, Any]]) -> None:
    rows = [row for row in run if row["kind"] == "row" and row["case"] == "optimizer 110M"]

    assert len(rows) == 9  # the kernels' reason, two passes of three kinds, two of torch's
    assert sum(row["value"].endswith("% of a copy") for row in rows) == 8


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_has_every_model_size_policy_and_mode() -> None:
    cases = plan(tiny=False)
    ways = {(c.model, c.batch, str(w)) for c in cases for w in c.ways}
    wanted = {
        (model, sizes[model], f"mezzo {policy} {mode}")
        for sizes in (SMALL, LARGE)
        for model in sizes
        for policy in POLICIES
        for mode in ("eager", "captured")
    }

    assert wanted <= ways
    assert {(m, LARGE[m], "mezzo bf16 compiled captured") for m in LARGE} <= ways
    for case in cases:  # whoever is captured stands beside others that are
        modes: dict[str, set[str]] = {way.library: set() for way in case.ways}
        for way in case.ways:
            modes[way.library].add(way.mode)
        if case.name.startswith(("captured", "peers", "compiled")):
            assert "captured" in modes["torch.amp"]
        if case.name.startswith("compiled"):
            assert "reduce-overhead" in modes["torch.amp"]
            # Its recording frees the workspaces of graphs that were captured before.
            assert case.ways[0].mode == "reduce-overhead"
    assert {
        (m, s[m], f"{peer} bf16 eager") for s in (SMALL, LARGE) for m in s for peer in ("accelerate", "fabric")
    } <= ways
    assert [c.name for c in cases[:4]] == [
        "roofs",
        "captured mobilenetv3_large b32",
        "captured bert_base b8",
        "optimizer 110M",
    ]
    assert len({c.name for c in cases}) == len(cases)
    assert all(c.reference in c.ways for c in cases if c.ways)
    assert sum(c.seconds for c in cases[:8]) < 8 * 60


def test_list_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "   50 s  captured mobilenetv3_large b32"


# --- a worker -------------------------------------------------------------------------------------


def make_worker(tmp_path: Path, *, deadline: float = math.inf) -> worker.Worker:
    settings = {"device": "cpu", "tiny": True, "only": "", "deadline": deadline, "command": "a test"}
    return worker.Worker({**settings, "results": str(tmp_path / "rows.jsonl")})


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    one = make_worker(tmp_path, deadline=time.time() + 0.5)
    one.run()

    rows = one.results.rows()
    assert {row["kind"] for row in rows} == {"environment", "row"}
    assert {row["status"] for row in rows[1:]} == {"not run"}
    assert rows[2]["why"].endswith("run again with --only 'captured tiny_convnet b4'")


def test_out_of_memory_takes_one_way_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(way: Way, *args: Any, **kwargs: Any) -> Contestant:
        if way == CASE.ways[1]:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return build(way, *args, **kwargs)

    monkeypatch.setattr(worker, "build", scarce)
    one = make_worker(tmp_path)
    one._training(CASE)

    found = {row["way"]: row["status"] for row in one.results.rows()}
    assert found == {"mezzo fp32 eager": "out of memory", str(LOOP): "measured", "mezzo fp16 eager": "measured"}


def test_a_way_that_fails_while_it_is_timed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wears_out(way: Way, *args: Any, **kwargs: Any) -> Contestant:
        contestant, calls = build(way, *args, **kwargs), iter(range(TINY.loss_steps))
        if way != LOOP:
            return contestant
        return Contestant(lambda batch: (next(calls), contestant.step(batch))[1])

    monkeypatch.setattr(worker, "build", wears_out)
    one = make_worker(tmp_path)
    one._training(CASE)

    rows = {row["way"]: row for row in one.results.rows()}
    assert rows[str(LOOP)]["why"] == "StopIteration: "
    assert rows["mezzo fp16 eager"]["status"] == "measured"
    assert "speed_median" not in rows["mezzo fp16 eager"]  # nothing to compare with


def test_a_way_that_failed_holds_nothing() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def fails() -> None:
        held = torch.zeros(4)
        alive.append(weakref.ref(held))
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB") from cause

    _, failed = timing.in_turn({"fails": fails, "goes on": lambda: None}, "cpu", TINY, math.inf)

    assert [str(error) for error in failed.values()] == ["tried to allocate 20 GiB"]
    assert alive[0]() is None


def test_a_format_that_is_not_supported_is_not_available(tmp_path: Path) -> None:
    one = make_worker(tmp_path)
    one._failed(CASE, "mezzo fp8 eager", UnsupportedFormatError("torchao is missing", hint="pip install torchao"))
    assert [row["status"] for row in one.results.rows()] == ["not available"]


def test_annotations_are_no_kernels() -> None:
    # Of torch 2.11's profile of a fused AdamW on a GPU: the annotation spans its kernels.
    def event(name: str, us: float, *, cuda: bool = True, annotation: bool = False) -> SimpleNamespace:
        kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
        return SimpleNamespace(key=name, device_type=kind, self_device_time_total=us, is_user_annotation=annotation)

    events = [
        event("Optimizer.step#AdamW.step", 130.0, annotation=True),
        event("multi_tensor_apply_kernel", 120.0),
        event("Memset", 10.0),
        event("aten::_fused_adamw_", 130.0, cuda=False),
    ]
    assert kernels.busy_us(events) == 130.0


def test_a_profile_tells_annotations_from_kernels() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        torch.zeros(4).add(1)
    assert all(isinstance(e.is_user_annotation, bool) for e in found.key_averages())
    assert kernels.busy_us(found.key_averages()) == 0.0


def test_a_rehearsal_leaves_everything_as_it_was() -> None:
    work = workload("tiny_convnet", tiny=True)
    batches = work.batches(4, "cpu", 3)

    def losses(*, rehearsed: bool) -> list[float]:
        model = work.model("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)  # overflows, so the rehearsal changes it

        def step(batch: Any) -> torch.Tensor:
            loss = work.loss(model, *batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        if rehearsed:
            with rewound(model, optimizer, scaler):
                for _ in range(3):
                    step(batches[0])
        return [*(float(step(batch)) for batch in batches), scaler.get_scale()]

    assert losses(rehearsed=True) == losses(rehearsed=False)


def test_a_loop_in_a_graph_keeps_what_the_graph_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays addresses. Seen on an H100: a model that nobody kept was freed, and the replay ended in illegal accesses."""

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("torch.cuda.current_stream", Stream)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    for name in ("stream", "graph"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _: nullcontext())
    work = workload("tiny_convnet", tiny=True)
    (batch,) = work.batches(4, "cpu", 1)

    def captured() -> tuple[Any, list[weakref.ref[Any]]]:
        model = work.model("cpu")
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
        replay = _in_a_graph(lambda inputs: work.loss(model, *inputs), model, optimizer, scaler, batch)
        return replay, [weakref.ref(one) for one in (model, optimizer, scaler)]

    replay, kept = captured()
    gc.collect()
    assert all(one() is not None for one in kept)
    replay(batch)


def test_a_loop_is_captured_on_cuda_only() -> None:
    work = workload("tiny_transformer", tiny=True)
    batches = work.batches(2, "cpu", 1)
    with pytest.raises(NotHereError, match="a CUDA graph needs a CUDA device"):
        build(Way("torch.amp", "bf16", "captured"), work, batches[0], "cpu", tiny=True)


def test_a_lost_gpu_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "lost", lambda: True)
    one = make_worker(tmp_path)
    one.device = "cuda"
    with pytest.raises(SystemExit) as stop:
        one._failed(CASE, "a way", RuntimeError("an illegal memory access"))

    assert stop.value.code == LOST
    assert [row["kind"] for row in one.results.rows()] == ["row", "end"]


def test_a_captured_step_is_called_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: mezzo.Session, compute_loss: Any, *examples: torch.Tensor) -> Any:  # what it does, without graphs
        def step(*inputs: torch.Tensor) -> torch.Tensor:
            assert [t.shape for t in inputs] == [t.shape for t in examples]
            with self.autocast():
                loss = compute_loss(*inputs)
            self.step(loss)
            return loss.detach()

        return step

    monkeypatch.setattr(mezzo.Session, "capture", capture, raising=False)
    work = workload("tiny_convnet", tiny=True)
    batches = work.batches(4, "cpu", 3)
    ways = [Way("mezzo", "fp16", mode) for mode in ("eager", "captured")]
    steps = [build(way, work, batches[0], "cpu", tiny=True).step for way in ways]

    eager, captured = ([step(batch).item() for batch in batches] for step in steps)
    assert eager == captured


# --- pieces ---------------------------------------------------------------------------------------


def test_runs_take_turns_and_move_on_every_round() -> None:
    order: list[str] = []
    sizes = timing.Sizes(rounds=4, block_ms=1e-9, loss_steps=1, copied=1, product=1, parameters=0)
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times, failed = timing.in_turn(runs, "cpu", sizes, math.inf)

    # The first round finds each one's steps with two more runs.
    assert "".join(order) == "aaabbbccc" + "bca" + "cab" + "abc"
    assert {name: len(ms) for name, ms in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert failed == {}


def test_after_the_deadline_three_rounds_are_made() -> None:
    sizes = timing.Sizes(rounds=9, block_ms=1e-9, loss_steps=1, copied=1, product=1, parameters=0)
    times, _ = timing.in_turn({"a": lambda: None}, "cpu", sizes, 0.0)

    assert len(times["a"]) == 3


def test_speed_is_taken_round_by_round() -> None:
    assert timing.speed([2.0, 4.0, 1.0], [4.0, 4.0, 5.0]) == {"speed_median": 2.0, "speed_min": 1.0, "speed_max": 5.0}
    assert timing.spread([3.0, 1.0, 2.0]) == {"ms_median": 2.0, "ms_min": 1.0, "ms_max": 3.0}


@pytest.mark.parametrize(("policy", "share"), [("fp16-master", 25.0), ("tf32", 50.0), ("fp8", None)])
def test_share_of_the_peak(policy: str, share: float | None) -> None:
    assert Roofs(tflops={"fp16": 4.0, "tf32": 2.0}).percent_of_peak(policy, 1.0) == share


def test_flops_of_a_sample(tmp_path: Path) -> None:
    # Convolutions of 3 x 3: 14 x 14 positions of 3 -> 8, 6 x 6 of 8 -> 8; a linear layer of 8 x 8. Forward, and both
    # gradients but that of the images.
    first, second, last = (2 * 9 * 3 * 8 * 14 * 14), (2 * 9 * 8 * 8 * 6 * 6), 2 * 8 * 8

    assert make_worker(tmp_path)._flops(workload("tiny_convnet", tiny=True)) == 2 * first + 3 * second + 3 * last


def test_the_optimizers_case_has_the_parameters_of_bert_base() -> None:
    shapes = kernels.shapes(12)

    assert (len(shapes), sum(math.prod(s) for s in shapes)) == (199, 109_482_240)


def test_precision_of_one_way_is_not_left_to_the_next() -> None:
    expected = {"fp32": ("highest", False), "tf32": ("high", True), "fp16": ("highest", True)}
    with fp32_products_as_they_were():
        for policy, switches in expected.items():
            timing.set_precision(policy)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == switches


@pytest.mark.parametrize("name", ["tiny_convnet", "tiny_transformer"])
def test_ways_begin_from_the_same_weights_and_batches(name: str) -> None:
    first, second = (workload(name, tiny=True) for _ in range(2))

    for a, b in zip(first.model("cpu").parameters(), second.model("cpu").parameters(), strict=True):
        assert torch.equal(a, b)
    one, other = first.batches(2, "cpu", 2)
    assert not torch.equal(one[0], other[0])
    assert all(torch.equal(a, b) for a, b in zip(one, second.batches(2, "cpu", 1)[0], strict=True))
    assert isinstance(first.model("cpu"), nn.Module)


# --- rows and pages -------------------------------------------------------------------------------

PAGE = """\
# One GPU

- device: a GPU
- torch: 2.13.0

## roofs

| what | value |
|---|---|
| copy | 3,000 GB/s |

## case

| way | ms a step | a second | against | peak MiB | loss | of peak | note |
|---|---|---|---|---|---|---|---|
| mezzo fp16 captured | 2.00 (1.90 to 2.50) | 16,000 images | 1.50x (1.40 to 1.60) | 1,024 | 0.1235 after 30 | 41% | one pass |
| torch.amp fp16 eager | 3.00 (2.90 to 3.10) | 10,667 images |  |  | 0.1235 after 30 |  |  |
| fabric fp16 eager |  |  |  |  |  |  | out of memory: tried 20 GiB / gave up |

## peers resnet50 b2

| what | value |
|---|---|
| not installed | No module named 'timm' |
"""


def test_page(tmp_path: Path) -> None:
    results = Results(tmp_path / "sub" / "rows.jsonl")
    results.add("environment", device="a GPU", torch="2.13.0")
    results.add("row", case="roofs", what="copy", value="3,000 GB/s", status="measured")
    results.add("row", case="case", way="fabric fp16 eager", status="out of memory", why="tried 20 GiB | gave up")
    same = {"case": "case", "status": "measured", "loss": 0.12345, "loss_steps": 30, "unit": "images"}
    fast = {"ms_median": 2.0, "ms_min": 1.9, "ms_max": 2.5, "a_second": 16000, "peak_mib": 1024.0, "note": "one pass"}
    fast |= {"speed_median": 1.5, "speed_min": 1.4, "speed_max": 1.6, "percent_of_peak": 41.2}
    slow = {"ms_median": 3.0, "ms_min": 2.9, "ms_max": 3.1, "a_second": 10666.7, "peak_mib": None, "note": ""}
    results.add("row", way="mezzo fp16 captured", **same, **fast)
    results.add("row", way="torch.amp fp16 eager", **same, **slow, percent_of_peak=None)
    results.add("row", case="peers resnet50 b2", way="", status="not installed", why="No module named 'timm'")

    assert results.write_markdown().read_text(encoding="utf-8") == PAGE


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl")
    results.add("begin", case="a")
    results.add("end", case="a", seconds=1)
    results.add("begin", case="b")
    with results.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "end", "ca')

    assert len(results.rows()) == 3
    assert results.begun() == ["a", "b"]
    assert results.open_case() == "b"


# --- the supervisor -------------------------------------------------------------------------------

BEGINS = """
import json, sys, time
path, ends = sys.argv[1], json.loads(sys.argv[2])
lines = [json.loads(line) for line in open(path)] if len(ends) else []
number = sum(line["kind"] == "begin" for line in lines)
case, code = ends[min(number, len(ends) - 1)]
if case not in [line["case"] for line in lines]:
    open(path, "a").write(json.dumps({"kind": "begin", "case": case}) + "\\n")
time.sleep(60) if code is None else sys.exit(code)
"""
ENDS = [
    # what each start begins and how it ends; exit code; rows
    ([("a", 0)], 0, []),
    ([("a", LOST), ("b", 0)], 0, [("a", "failed", f"the process ended with exit code {LOST}")]),
    ([("a", LOST), ("a", LOST)], LOST, [("a", "failed", f"the process ended with exit code {LOST}")]),
    ([("a", 2), ("b", 0)], 2, [("a", "failed", "the process ended with exit code 2")]),
    ([("a", None)], 0, [("a", "stopped", "the budget of 8 minutes ended")]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code", "rows"), ENDS)
def test_supervisor(tmp_path: Path, ends: list[Any], code: int, rows: list[tuple[str, str, str]]) -> None:
    results = Results(tmp_path / "rows.jsonl")
    results.path.touch()
    command = [sys.executable, "-c", BEGINS, str(results.path), json.dumps(ends)]
    budget = 4.0 if ends[0][1] is None else 60.0

    assert supervise(command, results, time.time() + budget, 8) == code
    assert [(r["case"], r["status"], r["why"]) for r in results.rows() if r["kind"] == "row"] == rows
