"""The benchmark of the host's time: what it measures where, in which processes, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
from benchmarks.shared.harness import over_builds
from benchmarks.shared.processes import Build, NoAnswerError, Spent, answer_of, build
from benchmarks.speed import host_time
from benchmarks.speed.host_time import PLANS, Plan, Script, folder_of, main, on_gpu, result

OWN = "as-is, the script's own autocast and GradScaler"
CASES = {
    # device and model: name, policy, the format of the loop by hand, whether it scales
    ("cpu", "mlp"): [
        ("as-is", None, None, False),
        ("as-is, the script's own GradScaler", None, torch.bfloat16, True),
        ("fp32", "fp32", None, False),
        ("bf16", "bf16:op_lists=device", torch.bfloat16, False),
        ("bf16 with the loss scale of fp16", "bf16:op_lists=device:loss_scale=dynamic", torch.bfloat16, True),
    ],
    ("cuda", "mlp"): [
        ("as-is", None, None, False),
        (OWN, None, torch.float16, True),
        ("fp32", "fp32", None, False),
        ("bf16", "bf16:op_lists=device", torch.bfloat16, False),
        ("fp16", "fp16:op_lists=device", torch.float16, True),
        ("by hand against itself", None, None, False),
    ],
    ("cuda", "gpt2"): [
        ("as-is", None, None, False),
        ("bf16", "bf16:op_lists=device", torch.bfloat16, False),
        ("fp16", "fp16:op_lists=device", torch.float16, True),
    ],
}


def test_cases_of_each_device_and_model() -> None:
    found = {key: [(c.name, c.policy, c.format, c.scales) for c in plan.cases] for key, plan in PLANS.items()}
    assert found == CASES
    for (device, model), plan in PLANS.items():
        assert (plan.device, plan.model) == (device, model)
        targets = {"bf16": "1.03 or less", "fp16": "1.03 or less", "as-is": "1.05 or less"}
        assert {c.name: c.target for c in plan.cases if c.name in targets}.items() <= targets.items()
        assert [c.name for c in plan.cases if c.own_amp] == [c.name for c in plan.cases if "own" in c.name]
        assert plan.untimed_steps > 100  # all later ones are of a steady run


def test_a_large_model_is_not_measured_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--model", "gpt2"])
    assert stop.value.code == 2
    assert "--model gpt2 needs --device cuda" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no GPU to measure on: .*is_available\(\) is false"):
        main(["--device", "cuda", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "4090"), ("Tesla T4", "t4"), ("a GPU", "a-gpu")],
)
def test_folder_of_a_gpu(gpu: str, folder: str) -> None:
    assert folder_of(gpu) == folder


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # 1 - 2 (1 + n + ...) / 2^n, by hand
    ("builds", "least", "greatest", "confidence"),
    [(12, 3, 10, 0.961), (9, 2, 8, 0.961), (8, 1, 8, 0.992), (6, 1, 6, 0.969), (5, 1, 5, 0.938), (1, 1, 1, 0.0)],
)
def test_interval_of_builds(builds: int, least: int, greatest: int, confidence: float) -> None:
    found = over_builds([[float(number)] for number in range(builds, 0, -1)])
    assert (found["interval"], found["confidence"]) == ([least, greatest], confidence)


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def works() -> Iterator[Callable[[], Any]]:
    yield lambda: None


@contextmanager
def raises_at_once() -> Iterator[Callable[[], Any]]:
    raise ValueError("no such device")
    yield


@contextmanager
def raises_in_a_block() -> Iterator[Callable[[], Any]]:
    turns = iter(range(1))
    yield lambda: next(turns)


@contextmanager
def dies() -> Iterator[Callable[[], Any]]:
    yield lambda: os._exit(7)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_fails_is_left_out_and_the_others_go_on(start: str) -> None:
    every = {one.__name__: one for one in (raises_at_once, works, raises_in_a_block, dies)}
    found = build(every, blocks=3, start=start)

    assert {name: len(spent) for name, spent in found.times.items()} == {"works": 3}
    assert found.failed["dies"] == "the process ended with exit code 7"
    assert found.failed["raises_at_once"].startswith("ValueError at test_host_time.py:")
    assert found.failed["raises_at_once"].endswith(": no such device")
    assert found.failed["raises_in_a_block"].startswith("StopIteration at test_host_time.py:")


def test_an_answer_of_a_process_thrown_away() -> None:
    assert answer_of(os.getpid) != os.getpid()
    with pytest.raises(NoAnswerError, match="exit code 3"):
        answer_of(lambda: os._exit(3))


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: after a backward pass nothing can be forked"
)


def tiny(**changes: Any) -> Plan:
    return replace(PLANS["cuda", "mlp"], device="cpu", untimed_steps=3, steps=1, blocks=2, **changes)


@no_gpu
def test_the_process_that_forks_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has run a backward pass where a GPU is has no forks that can."""
    made, script = tmp_path / "made", host_time.script

    def noted(*args: Any, **kwargs: Any) -> Any:
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return script(*args, **kwargs)

    monkeypatch.setattr(host_time, "script", noted)
    monkeypatch.setattr(host_time, "SIZES", (4, 8, 2))
    plan = tiny(cases=PLANS["cuda", "mlp"].cases[:2], seconds=0.0)
    (found,) = list(on_gpu(plan, began_s=0.0, start="fork"))  # no time is left, and one build is made

    assert len(found) == 1
    assert {name: len(times) for name, times in found[0].times.items()} == dict.fromkeys(
        ("as-is: mezzo", "as-is: hand", f"{OWN}: mezzo", f"{OWN}: hand"), 2
    )
    pids = made.read_text().split()
    assert len(set(pids)) == len(pids) == 4
    assert str(os.getpid()) not in pids


def test_scripts_can_be_sent_to_processes_started_anew() -> None:
    every = [Script(plan, case, by) for plan in PLANS.values() for case in plan.cases for by in (True, False)]
    assert pickle.loads(pickle.dumps(every)) == every


# --- what is written ------------------------------------------------------------------------------


def test_rows_of_builds() -> None:
    plan = replace(PLANS["cuda", "mlp"], cases=PLANS["cuda", "mlp"].cases[:2], steps=2)
    times = {"as-is: mezzo": [Spent(3.0, 6.0, 12.0)], "as-is: hand": [Spent(2.0, 3.0, 8.0)]}
    rows, data = result(plan, [Build(times, {f"{OWN}: mezzo": "ValueError: no"})] * 2)

    assert rows == [
        ("as-is: wall time a step", "1.500x (1.500 to 1.500, 2 builds)", "1.05 or less"),
        ("as-is: CPU time of all threads a step", "2.000x (2.000 to 2.000, 2 builds)", "1.05 or less"),
        (f"{OWN}: mezzo", "failed: ValueError: no", ""),
    ]
    assert list(data) == ["as-is"]
    assert {what: (one["ratio"], one["by_hand_us_a_step"]) for what, one in data["as-is"].items()} == {
        "wall time": (1.5, 4000.0),
        "CPU time of all threads": (2.0, 1500.0),
        "thread CPU time": (1.5, 1000.0),
    }


@pytest.mark.slow
@no_gpu
def test_it_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "BUILDS", 1)
    monkeypatch.setattr(host_time, "SIZES", (4, 8, 2))
    monkeypatch.setitem(PLANS, ("cpu", "mlp"), tiny(cases=PLANS["cpu", "mlp"].cases, shown=("thread_ms",)))
    main(["--out", str(tmp_path)])

    found = json.loads((tmp_path / "host_time.json").read_text())
    assert found["command"] == "python -m benchmarks host_time"
    assert found["environment"]["device"] == "cpu"
    names = [name for name, *_ in CASES["cpu", "mlp"]]
    assert [row["what"] for row in found["rows"]] == [f"{name}: thread CPU time a step" for name in names]
    assert all(row["measured"].endswith("x (one build)") for row in found["rows"])
