"""Commands and sessions on two GPUs that compute nothing: torch's own CUDA code runs, and what it asks of the driver is counted.

What an operation computes is not tested here. Where it runs, in which thread, and whether the host waits for it is.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import null_gpu
import pytest

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.slow,
    pytest.mark.skipif(bool(null_gpu.missing()), reason=f"a GPU that computes nothing {null_gpu.missing()}"),
]
HERE = Path(__file__).parent
SCRIPT = str(HERE / "null_script.py")
LAYERS = ("first", "plain.up", "plain.down", "again.up", "again.down", "last")


def mezzo(folder: Path, *arguments: str) -> Path:
    """Run a command on a script in ``folder``; return the folder of its record."""
    out = folder / "out"
    done = null_gpu.run("-m", "mezzo", *arguments[:-2], "--out", str(out), SCRIPT, *arguments[-2:], folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def asked(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "asked.json").read_text())
    return found


@pytest.mark.parametrize(
    ("policy", "device", "waits"),
    [
        ("as-is", "cuda:0", 0),
        ("fp32", "cuda:1", 0),
        ("tf32", "cuda:0", 0),
        ("bf16", "cuda:1", 0),
        ("fp16", "cuda:1", 1),
        ("bf16-master", "cuda:0", 0),
    ],
)
def test_a_script_waits_for_the_scales_flag_alone(policy: str, device: str, waits: int, tmp_path: Path) -> None:
    out = mezzo(tmp_path, "run", "--policy", policy, str(tmp_path / "asked.json"), device)
    found = asked(tmp_path)
    assert found["before_line_1"] == 0
    # The first step checks the loss, the second and third are inspected.
    assert found["waits"][3:] == [waits] * len(found["waits"][3:])
    record = json.loads((out / "record.json").read_text())
    assert record["environment"]["gpu"] == "a GPU that computes nothing"
    assert len(record["steps"]["loss"]) == len(found["waits"])


def test_as_is_waits_where_the_scripts_own_scaler_does(tmp_path: Path) -> None:
    alone = null_gpu.run(SCRIPT, str(tmp_path / "asked.json"), "cuda:1", "own", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr[-3000:]
    own = asked(tmp_path)
    out = tmp_path / "out"
    command = ["run", "--policy", "as-is", "--out", str(out), SCRIPT, str(tmp_path / "asked.json"), "cuda:1", "own"]
    done = null_gpu.run("-m", "mezzo", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert asked(tmp_path)["waits"][3:] == own["waits"][3:]


def test_runs_are_forked_from_a_process_that_never_asked_the_driver(tmp_path: Path) -> None:
    """Counts are inherited by a fork: what is 0 at the script's first line was 0 before the fork."""
    alone = (
        tmp_path / "alone"
    )  # a file beside a script that names a compiler's variable would keep its runs from being forked
    alone.mkdir()
    script = shutil.copy(SCRIPT, alone)
    command = ["compare", "--policies", "fp32,bf16", "--seeds", "1", "--out", str(tmp_path / "out"), script]
    done = null_gpu.run("-m", "mezzo", *command, str(tmp_path / "{run}.json"), "cuda:1", folder=tmp_path)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == 2, done.stderr[-3000:]
    assert [run["before_line_1"] for run in found] == [0, 0]
    assert all("mezzo.children.fork_server" in run["parent"] for run in found)


@pytest.mark.parametrize(("policy", "device"), [("as-is", "cuda:1"), ("fp16", "cuda:0")])
def test_an_audit_finds_the_module_of_every_product(policy: str, device: str, tmp_path: Path) -> None:
    """Autograd has a thread of its own for each GPU, which numbers its nodes by itself and runs no Python around an operation."""
    out = mezzo(tmp_path, "audit", "--policy", policy, "--at", "3", str(tmp_path / "asked.json"), device)
    record = json.loads((out / "record.json").read_text())
    found = Counter({(o["module"], o["phase"]): o["count"] for o in record["operations"] if o["flops"]})
    expected = Counter({(layer, phase): 1 for layer in LAYERS for phase in ("forward", "dgrad", "wgrad")})
    del expected["first", "dgrad"]  # its input needs no gradient
    expected.update({("again.up", "recompute"): 1, ("again.down", "recompute"): 1})
    assert found == expected
    assert {o["format"] for o in record["operations"] if o["flops"]} == {"fp16" if policy == "fp16" else "fp32"}


SESSIONS = [
    # the policy, the optimizer, waits of a step, whether updates are launches of ours, the device
    ("fp16", "mezzo.AdamW", 0, True, "cuda:1"),
    ("bf16", "mezzo.SGD", 0, True, "cuda:0"),
    ("bf16-master", "mezzo.AdamW", 0, True, "cuda:1"),
    ("fp16-master", "mezzo.AdamW", 0, True, "cuda:0"),
    ("fp16", "torch.optim.AdamW", 1, False, "cuda:1"),
    ("bf16", "torch.optim.SGD", 0, False, "cuda:0"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache that Triton's kernels are compiled into once."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize(("policy", "optimizer", "waits", "ours", "device"), SESSIONS)
def test_a_session_keeps_its_budgets(
    policy: str, optimizer: str, waits: int, ours: bool, device: str, kernels: Path, tmp_path: Path
) -> None:
    done = null_gpu.run(
        str(HERE / "null_sessions.py"), device, policy, optimizer, folder=tmp_path, TRITON_CACHE_DIR=str(kernels)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["waits"][1:] == [waits] * 7  # the first step checks the loss
    assert found["mixed"] == []
    assert found["saved_bytes"] == 0
    if ours:
        assert found["update"] == "Triton kernels, one launch per group"
        assert found["launches"] == [found["launches"][0]] * 8
        assert found["loaded_bytes"] <= found["largest_bytes"]
        assert (found["replay_waits"], found["graphs_launched"]) == (0, 7)
    else:
        assert found["launches"] == [0] * 8
        assert "not all optimizers are Mezzo's own" in found["not_captured"]


BY_VALUES = (
    "ScaleFloorError",
    "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite",
)
"""How a way fails whose gradients are what lay in the memory before."""


def test_the_benchmark_runs_its_ways_captured_too(kernels: Path, tmp_path: Path) -> None:
    cases = "^(captured tiny_convnet|optimizer|policy bf16 )"
    program = [str(HERE / "null_benchmark.py"), str(tmp_path / "rows.jsonl"), "200", cases]
    done = null_gpu.run(*program, folder=tmp_path, TRITON_CACHE_DIR=str(kernels))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = {(r["case"], r["way"]): r for r in rows if r["kind"] == "row" and r.get("way")}
    failed = {key: r["why"] for key, r in ways.items() if r["status"] not in ("measured", "not installed")}
    assert {key: why for key, why in failed.items() if not why.startswith(BY_VALUES)} == {}
    captured = {
        f"{case}: {way}" for (case, way), r in ways.items() if way.endswith(" captured") and (case, way) not in failed
    }
    assert {
        "captured tiny_convnet b4: torch.amp fp16 captured",
        "captured tiny_convnet b4: mezzo fp16 captured",
        "policy bf16 tiny_transformer b2: mezzo bf16 captured",
    } <= captured
    passes = [r["value"] for r in rows if r["kind"] == "row" and r["case"].startswith("optimizer")]
    assert passes[0] == "Triton kernels, one launch per group"
    assert len(passes) == 17  # as called, and kernels alone, of which the profiler has none
    assert all(
        value.endswith("% of a copy") or value.startswith("the profiler returned no kernel") for value in passes[1:]
    )


@pytest.mark.parametrize(("model", "start"), [("mlp", "fork"), ("gpt2", "fork")])
def test_host_time_is_measured_in_processes_that_have_the_gpu(model: str, start: str, tmp_path: Path) -> None:
    """No driver call before a fork: seen first with transformers' GPT-2, whose import asks the driver where torchao is installed."""
    if model == "gpt2":
        pytest.importorskip("transformers")
    done = null_gpu.run(str(HERE / "null_host_time.py"), str(tmp_path), model, start, folder=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.splitlines()[-1] == "driver calls of the process that forks: 0"
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert found["environment"]["gpu"] == "a GPU that computes nothing"
    cases = 6 if model == "mlp" else 3
    assert [row["measured"].partition(" ")[2][:4] for row in found["rows"]] == ["(one"] * 2 * cases
