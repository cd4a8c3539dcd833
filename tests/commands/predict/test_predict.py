"""``mezzo predict`` on a small model, from the words typed to the record and both views."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from helpers_predict import traced_in_forks
from mezzo import cli
from mezzo.commands.predict.traced import of_script
from mezzo.errors import UsageError
from mezzo.measure.predict import calibrate, configurations
from mezzo.measure.predict.calibrate import Calibration, probes
from mezzo.records import DataSet, PredictRecord, read_record
from mezzo.report.formatting import rate_text
from paths import ROOT

pytest.importorskip("transformers", reason="transformers builds the model")
TINY = {
    "tiny": {"type": "gpt2", "task": "causal", "config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}}
}


@pytest.fixture(autouse=True)
def _only_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "configurations", lambda: TINY)


def test_a_prediction_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "predict --model transformers:tiny --sequence 16 --batch 8 --gpus a100-80gb,T4 --policies fp32,tf32,bf16 --out"
    )
    assert cli.main([*words.split(), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "runs fastest on" in shown
    assert "Input: 16 tokens. Optimizer: adamw. Predicted, not measured." in shown
    assert "T4 has no units for bf16." in shown
    assert "80.0 GiB" in shown
    assert "largest batch fits into 87% of the memory" in " ".join(shown.split())
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert [(one.gpu, one.policy, one.possible) for one in record.predictions] == [
        ("a100-80gb", "fp32", True),
        ("a100-80gb", "tf32", True),
        ("a100-80gb", "bf16", True),
        ("t4", "fp32", True),
        ("t4", "tf32", True),
        ("t4", "bf16", False),
    ]
    assert sum(record.predictions[0].bounds.values()) == pytest.approx(1)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Where the time and the memory go" in page
    assert "Input: 16 tokens. Optimizer: adamw" in page


@pytest.mark.slow
def test_prices_masters_fp8_and_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model transformers:tiny --gpus h100 --policies fp32,bf16-master,fp8 --price 3.6 --slurm "
    words += "--host 0.1 --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, PredictRecord)
    for one in record.predictions:
        assert one.cost_per_million == pytest.approx(1000 / one.throughput)
    assert [one.validated for one in record.predictions] == [True, False, False]
    assert record.detail is not None
    assert {curve.policy for curve in record.detail.curves} == {"fp32", "bf16-master", "fp8"}
    assert record.slurm[2] == "#SBATCH --gres=gpu:h100:1"
    shown = capsys.readouterr().out
    assert "#SBATCH --gres=gpu:h100:1" in shown
    assert "Not validated, for want of measurements: h100-sxm in bf16-master and h100-sxm in fp8." in " ".join(
        shown.split()
    )


SCRIPT = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
loader = torch.utils.data.DataLoader(data, batch_size=16)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_script_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    words = [
        "predict",
        "--gpus",
        "t4",
        "--policies",
        "fp32",
        "--batch",
        "32",
        "--host",
        "0.01",
        "--verbose",
        "--out",
        str(tmp_path / "out"),
        str(path),
    ]
    with traced_in_forks():
        assert cli.main(words) == 0
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert (record.batch, record.unit, record.optimizer) == (32, "samples", "SGD")
    assert (record.predictions[0].largest_batch, record.predictions[0].largest_limit) == (64, "data set")
    assert record.data == DataSet(samples=64)
    assert record.loader is not None
    assert record.predictions[0].slower == "loader"
    shown = " ".join(capsys.readouterr().out.split())
    assert "batch 16 samples what the DataLoader yields" in shown
    assert (
        f"if the loader keeps up, which delivers {rate_text(record.loader.samples_per_s or 0)} on this machine" in shown
    )
    assert f"input pipeline {rate_text(record.loader.samples_per_s or 0)} samples/s what the loader alone" in shown
    assert "64 (all)" in shown
    assert "the batch is limited to the data set of 64 samples, not by memory" in shown
    assert "with no workers, less than the GPU would train on" in shown


FP16_FAILS = """
import torch
class Fails(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.zeros(16, 4).scatter(1, torch.zeros(16, 1, dtype=torch.int64), y[:, :1])
model = Fails(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_policy_under_which_a_script_fails_has_the_reason_in_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(FP16_FAILS, encoding="utf-8")
    words = [
        "predict",
        "--gpus",
        "a100-80gb",
        "--policies",
        "fp32,tf32,fp16",
        "--out",
        str(tmp_path / "out"),
        str(path),
    ]
    with traced_in_forks():
        assert cli.main(words) == 0
        capsys.readouterr()
        assert cli.main([*words[:4], "fp16", *words[5:]]) == 7
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert [(one.policy, one.possible) for one in record.predictions] == [
        ("fp32", True),
        ("tf32", True),
        ("fp16", False),
    ]
    assert record.predictions[2].reason.startswith("fails under fp16: train.py:6: RuntimeError: ")
    assert "dtype" in record.predictions[2].reason
    told = " ".join(capsys.readouterr().err.split())
    assert "train.py fails under fp16: train.py:6: RuntimeError: " in told
    assert "mezzo fallback --policy fp16" in told


ASKS = """
import torch
if torch.cuda.is_available():
    {on_a_gpu}
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
"""
TOLD = [
    ("print()", "the GPU that the script sees", "it queries torch.cuda.is_available()"),
    (
        "torch.ops.of_a_gpu.kernel()",
        "torch.cuda.is_available()",
        "where it is True, the script fails on this machine: train.py:4: ",
    ),
    (
        "exit(3)",
        "torch.cuda.is_available()",
        "where it is True, the script fails on this machine: exit code 3",
    ),
]


@pytest.mark.usefixtures("cpu_alone")
@pytest.mark.parametrize(("on_a_gpu", "what", "why"), TOLD, ids=["runs", "fails", "exits"])
def test_what_a_script_is_told_of_a_gpu_is_recorded(on_a_gpu: str, what: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ASKS.replace("{on_a_gpu}", on_a_gpu), encoding="utf-8")
    words = ["predict", "--gpus", "t4", "--policies", "fp32", "--out", str(tmp_path / "out"), str(path)]
    with traced_in_forks():
        assert cli.main(words) == 0
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert record.predictions[0].possible
    (found,) = [one for one in record.assumptions if one.what == what]
    assert found.reason.startswith(why)


@pytest.mark.parametrize("word", ["--sequence", "--image"])
def test_options_of_models_are_not_a_scripts(word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["predict", word, "128", "--out", str(tmp_path), "train.py"]) == 2
    assert f"{word} 128 belongs to --model; train.py has its own" in capsys.readouterr().err


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main(["predict", "--out", str(tmp_path), str(tmp_path / "trian.py")]) == 2
    assert "did you mean train.py?" in capsys.readouterr().err


def test_a_job_of_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "predict --model transformers:tiny --gpus a100-80gb --policies fp32 --gpus-per-job 8 --shard fsdp --json --out"
    )
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["gpus_per_job"], record["shard"]) == (8, "fsdp")
    found = record["predictions"][0]
    assert found["validated"] is False
    assert found["throughput"] == pytest.approx(8 * 32 / (found["step_ms"] / 1e3))
    assert found["communication_ms"] > 0
    assert any(one["value"] == "eager, 8 GPUs of one machine, fsdp" for one in record["assumptions"])


@pytest.mark.usefixtures("cpu_alone")
def test_a_calibration_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "probes", lambda scale: [next(probes())])
    monkeypatch.setattr(calibrate, "_PROBE_S", 0.05)
    words = ["predict", "--model", "transformers:tiny", "--gpus", "cpu", "--policies", "fp32"]
    assert cli.main([*words, "--out", str(tmp_path / "before")]) == 2
    assert ": not calibrated\n" in capsys.readouterr().err
    assert cli.main(["predict", "--calibrate"]) == 0
    kept = next((tmp_path / "mezzo" / "calibration").iterdir())
    assert str(kept.name) in capsys.readouterr().err.replace("\n", "")
    assert cli.main([*words, "--out", str(tmp_path / "after")]) == 0
    record = read_record(tmp_path / "after" / "record.json")
    assert isinstance(record, PredictRecord)
    assert [(one.gpu, one.calibrated) for one in record.predictions] == [("cpu", True)]
    assert [one.value for one in record.assumptions if one.what == "rates of cpu"] == [str(kept)]
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    with traced_in_forks():
        assert cli.main(["predict", *words[3:], "--out", str(tmp_path / "script"), str(path)]) == 0
    record = read_record(tmp_path / "script" / "record.json")
    assert isinstance(record, PredictRecord)
    (own,) = record.predictions
    assert (own.gpu, own.calibrated, record.batch) == ("cpu", True, 16)
    assert own.throughput == pytest.approx(16e3 / own.step_ms)
    assert "mezzo check " in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_checkpointing_shows_what_it_costs_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model transformers:tiny --batch 64 --gpus a100-80gb --policies fp16 --checkpoint full,selective --verbose --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, PredictRecord)
    plain, full, selective = record.predictions
    assert [one.checkpoint for one in record.predictions] == ["", "full", "selective"]
    assert plain.allocated_bytes > selective.allocated_bytes > full.allocated_bytes
    assert plain.step_ms < full.step_ms
    assert "fp16, full" in shown
    assert "; the step takes" in shown


def test_the_record_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model transformers:tiny --gpus all --policies fp32 --json --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    rates = [one["throughput"] for one in json.loads(capsys.readouterr().out)["predictions"]]
    assert len(rates) > 30
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus h101", "'h101' is not a GPU"),
        ("--policies fp32,fp4", "unknown policy 'fp4'"),
        ("--price free", "--price 'free' has 'free' where a price for an hour belongs"),
        ("-m", "-m belongs to a script, not to --model transformers:tiny"),
        ("--optimizer adamwx", "--optimizer 'adamwx'; did you mean adamw"),
        ("--model transformers:tinny", "no configuration for 'tinny'"),
    ],
)
def test_bad_words(words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = [] if "--model" in words else ["--model", "transformers:tiny"]
    assert cli.main(["predict", *model, *words.split(), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--model", "transformers:tiny", "train.py"]], ids=["neither", "both"])
def test_a_script_or_a_model(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["predict", "--out", str(tmp_path), *words]) == 2
    assert "predict needs either a script or a model" in capsys.readouterr().err


def test_a_model_that_refuses_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = {
        "tiny": {
            **TINY["tiny"],
            "config": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "activation_function": "no"},
        }
    }
    monkeypatch.setattr(configurations, "configurations", lambda: broken)
    assert cli.main(["predict", "--model", "transformers:tiny", "--out", str(tmp_path)]) == 2
    assert "one step of transformers:tiny cannot be traced without numbers in fp32" in capsys.readouterr().err


COMMANDS = re.findall(r"^    (mezzo predict .*)$", (ROOT / "docs" / "predict.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_docs(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the real configurations
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where a calibration is saved
    monkeypatch.setattr(calibrate, "probes", lambda scale: [next(probes())])
    monkeypatch.setattr(calibrate, "_PROBE_S", 0.05)
    words = command.split()
    library = words[words.index("--model") + 1].partition(":")[0] if "--model" in words else ""
    if "train.py" in words or (library and importlib.util.find_spec(library) is None):
        pytest.skip("it names a script or a library that is not here")
    monkeypatch.chdir(ROOT)
    assert cli.main([*words[1:2], "--out", str(tmp_path), *words[2:]]) == 0


def test_the_docs_have_commands_that_run_here() -> None:
    assert any("examples/digits.py" in command for command in COMMANDS)


@pytest.mark.parametrize("imported", ["keras", "tensorflow.keras", "paddle"])
def test_scripts_of_a_framework_that_is_not_here_are_refused_with_its_name(
    imported: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, framework = tmp_path / "train.py", imported.rpartition(".")[2]
    if importlib.util.find_spec(framework) is not None:
        pytest.skip("it is here")
    script.write_text(f"import {imported}\n", encoding="utf-8")
    assert cli.main(["predict", "--out", str(tmp_path), str(script)]) == 7
    assert f"the script imports {framework}, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["keras", "paddle"])
def test_the_cpu_is_predicted_for_pytorch_only(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import {framework}\n", encoding="utf-8")
    calibration = Calibration(device="a CPU", threads=1, date="", torch="", rates={}, low=0.9, high=1.1)
    with pytest.raises(UsageError, match=r"--gpus cpu predicts PyTorch.*train\.py is none"):
        of_script(str(path), [], ["fp32"], None, False, calibration=calibration)


@pytest.mark.parametrize("framework", ["keras", "paddle"])
def test_several_gpus_are_refused_before_a_keras_or_paddle_script_runs(
    framework: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import {framework}\nopen(__file__ + '.ran', 'w')\n", encoding="utf-8")
    assert cli.main(["predict", "--gpus-per-job", "2", "--out", str(tmp_path), str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--gpus-per-job 2 predicts PyTorch scripts" in said
    assert "one GPU of the job computes what this prediction says" in said
    assert not (tmp_path / "train.py.ran").exists()
