"""Unmodified scripts: what their tapes contain, and the errors of those that cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_predict import traced_in_forks
from helpers_values import existing
from mezzo.errors import ScriptError, UsageError
from mezzo.measure.predict.result_sizes import UnknownSize
from mezzo.measure.predict.script import recorder as script_recorder
from mezzo.measure.predict.script import tapes
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest, recorded_tapes
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.tape_memory import bytes_by_kind
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

SCRIPT = """
import sys
import torch
from torch import nn

data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to("cpu")
optimizer = torch.optim.AdamW(model.parameters())
total = 0.0
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if torch.isnan(loss):
            raise SystemExit("the loss is not a number")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        assert epoch == 0, "the script was not stopped"
"""


def _written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _recorded_here(script: str, arguments: list[str], policy: str) -> TrainingTape | None:
    return record_script(TapeRequest(script=script, arguments=arguments, policy=policy)).tape


def _recorded(script: str, policy: str) -> TrainingTape:
    tape = existing(recorded_tapes([TapeRequest(script=script, arguments=[], policy=policy)])[0].tape)
    return tape


def _called(policy: str) -> TrainingTape:
    def loss(model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
        return nn.functional.cross_entropy(model(inputs["x"]), inputs["y"]), None

    return record_training(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        lambda n: {"x": torch.empty(n, 8), "y": torch.empty(n, dtype=torch.long)},
        loss,
        batch=4,
        optimizer=partial(torch.optim.AdamW),
        policy=Policy.parse(policy),
    )


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16"])
def test_a_script_has_the_tape_of_its_model(policy: str, tmp_path: Path) -> None:
    tape = _recorded_here(_written(tmp_path, SCRIPT), ["4"], policy)
    wanted = _called(policy)
    assert tape is not None

    def products(one: TrainingTape) -> list[tuple[Any, ...]]:
        return [(op.name, op.phase, op.module, op.format, op.shape) for op in one.operations if op.flops]

    assert products(tape) == products(wanted)
    found, other = (bytes_by_kind(one, until=one.backward_starts[-1] - 1) for one in (tape, wanted))
    for kind in ("parameters", "optimizer"):
        assert found[kind] == other[kind]
    assert abs(found["activations"] - other["activations"]) <= 8  # the script's loss is alive


def test_a_larger_batch_computes_more(tmp_path: Path) -> None:
    path = _written(tmp_path, SCRIPT)
    flops = [sum(op.flops for op in tape.operations) for n in ("4", "8") if (tape := _recorded_here(path, [n], "fp32"))]
    assert flops[1] == 2 * flops[0]


PARSED = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr'); p.parse_args(['--foo', '1'])"
REPEATED = "import torch\nprint(torch.ones(3).repeat_interleave(torch.arange(3)).shape)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", "never trains: it ended after 0 of 2 optimizer steps"),
        ("raise ValueError('no data')", "train.py:1: ValueError: no data"),
        ("import sys; sys.exit('no --data')", r"ended before it trained: exit code 1 \(no --data\)"),
        (PARSED, r"exit code 2 \(train.py: error: unrecognized arguments: --foo 1\)"),
        (REPEATED, "never trains: it ended after 0 of 2 optimizer steps"),  # traced again, with numbers
        ("import os\nos.kill(os.getpid(), 11)", "its native code, such as an optimizer's kernels, reads the memory"),
        ("import os\nos.kill(os.getpid(), 9)", "it was killed, probably because the machine ran out of memory"),
    ],
)
def test_a_script_without_steps(text: str, message: str, tmp_path: Path) -> None:
    with traced_in_forks(), pytest.raises(ScriptError, match=message):
        _recorded(_written(tmp_path, text), "fp32")


COUNTED = """
import torch
from torch import nn
rows = torch.arange(3).repeat_interleave(torch.randint(2, 3, (3,)))
model = nn.Linear(len(rows), 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    right = torch.zeros(4, dtype=torch.long)
    model(torch.randn(4, len(rows))).mean().backward()
    optimizer.step()
    PRINTED
"""


def test_a_script_whose_sizes_depend_on_its_data_has_numbers_until_its_first_module(tmp_path: Path) -> None:
    script = _written(tmp_path, COUNTED.replace("PRINTED", "print(1.0 / right.random_().sum().item())"))
    with traced_in_forks():
        (made,) = recorded_tapes([TapeRequest(script=script, arguments=[], policy="fp32")])
    weights = [block.size_bytes for block in existing(made.tape).blocks if block.kind == "parameters"]
    assert (made.numbers_first, made.whole_number, sum(weights)) == (True, 1, 4 * (6 * 2 + 2))
    assert made.sized_by.startswith("train.py:4: UnknownSize: the size of repeat_interleave depends on numbers")


def test_the_error_is_that_of_the_line_that_data_with_numbers_do_not_help(tmp_path: Path) -> None:
    script = _written(tmp_path, COUNTED.replace("PRINTED", "rows[:4].repeat_interleave(right.random_())"))
    with (
        traced_in_forks(),
        pytest.raises(ScriptError, match=r"train\.py:11: UnknownSize: the size of repeat_interleave"),
    ):
        _recorded(script, "fp32")


@pytest.mark.parametrize(
    ("printed", "whole"), [("print(1.0 / right.sum().item())", 1), ("print(1 / right[0].item() * int(right[1]))", 1)]
)
def test_a_script_that_divides_by_a_whole_number_gets_1(printed: str, whole: int, tmp_path: Path) -> None:
    text = COUNTED.replace("torch.randint(2, 3, (3,))", "2")
    with traced_in_forks():
        script = _written(tmp_path, text.replace("PRINTED", printed.replace("right", "right.random_()")))
        (made,) = recorded_tapes([TapeRequest(script=script, arguments=[], policy="fp32")])
        assert (made.whole_number, made.read_at) == (whole, ["train.py:11"])
        script = _written(tmp_path, text.replace("PRINTED", "1 / (right.random_()[0].item() - right[1].item())"))
        with pytest.raises(ScriptError, match=r"train\.py:11: ZeroDivisionError") as told:
            _recorded(script, "fp32")
    assert "divide tensors instead" in str(told.value)


def test_a_loop_that_waits_for_a_number_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_recorder, "_MOST_READS", 50)
    text = COUNTED.replace("torch.randint(2, 3, (3,))", "2").replace(
        "PRINTED", "while not right.random_().sum() > 1: pass"
    )
    with pytest.raises(UnknownSize, match=r"train\.py:11 reads numbers without end"):
        _recorded_here(_written(tmp_path, text), [], "fp32")


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"there is no script 'nowhere\.py'"):
        _recorded("nowhere.py", "fp32")


IN_A_JOB = """
import os
import torch
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    torch.distributed.init_process_group("gloo")  # waits for a second process, which never comes
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_is_traced_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(IN_A_JOB, encoding="utf-8")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert _recorded(str(tmp_path / "train.py"), "fp32").step_starts


TRAINED = """
import torch
from torch import nn
model = nn.Sequential(SETUP)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(INPUT).square().mean().backward()
    optimizer.step()
"""


DATA, FALLBACK = "torch.randn(16, 8)", "mezzo fallback --policy"
WIDE, SPARSE = "nn.Linear(8, 4, dtype=torch.float64)", "nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)"
SCATTERED = (
    "nn.Linear(8, 4), type('M', (nn.Linear,), {'forward': lambda m, x: torch.zeros(x.shape).scatter("
    "1, torch.zeros(16, 1, dtype=torch.int64), nn.functional.linear(x, m.weight))})(4, 1)"
)
TRANSFORM = "type('F', (nn.Module,), {'forward': lambda m, x: torch.fft.fft(x).abs()})()"
FOURIER = f"nn.Linear(8, 12), {TRANSFORM}, nn.Linear(12, 4)"
NOT_HERE = "imports 'surely_not_here', which is not installed here: train.py:"
NO_KERNEL = r"NoKernelError: cuFFT only supports .* but got a signal size of\[12\]"


@pytest.mark.parametrize(
    ("setup", "data", "policy", "message", "hint"),
    [
        (WIDE, "torch.randn(16, 8).double()", "fp32", "100% of its FLOPs are in float64", "convert model and data to"),
        (
            SPARSE,
            "torch.randint(0, 9, (16,))",
            "fp32",
            "it computes with sparse tensors",
            "sparse=False in its nn.Embedding",
        ),
        ("__import__('surely_not_here.part')", "0", "fp32", NOT_HERE, "install it for "),
        (SCATTERED, DATA, "bf16", r"fails under bf16: .*train.py:4: RuntimeError: .*dtype", f"{FALLBACK} bf16"),
        (FOURIER, DATA, "fp16", rf"fails under fp16: .*train.py:4: {NO_KERNEL}", f"{FALLBACK} fp16"),
        (FOURIER, DATA, "fp16-pure", rf"fails under fp16-pure: .*train.py:4: {NO_KERNEL}", f"{FALLBACK} fp16-pure"),
    ],
)
def test_what_a_trace_cannot_price_is_said(
    setup: str, data: str, policy: str, message: str, hint: str, tmp_path: Path
) -> None:
    script = _written(tmp_path, TRAINED.replace("SETUP", setup).replace("INPUT", data))
    with traced_in_forks(), pytest.raises(ScriptError, match=message) as told:
        _recorded(script, policy)
    assert hint in told.value.hint


def test_a_transform_that_cuda_computes_in_16_bit_weights_is_traced(tmp_path: Path) -> None:
    setup = f"nn.Linear(8, 16), {TRANSFORM}, nn.Linear(16, 4)"
    script = _written(tmp_path, TRAINED.replace("SETUP", setup).replace("INPUT", DATA))
    with traced_in_forks():
        assert _recorded(script, "fp16-pure").batch == 16


GOOD = ScriptTape(tape=TrainingTape(batch=1), num_steps=2)
BAD = ScriptTape(tape=None, error="train.py:3: RuntimeError: no kernel")
TOLD = replace(BAD, gpu_queries=["torch.cuda.is_available"])


@pytest.mark.parametrize(
    ("policies", "first", "again", "expected"),
    [
        (["fp32", "fp16"], [GOOD, BAD], [], [GOOD, BAD]),
        (["fp32", "fp16"], [GOOD, TOLD], [], [GOOD, TOLD]),  # the GPU is not to blame
        (["fp32", "fp16"], [BAD, GOOD], [], "train.py:3: RuntimeError: no kernel"),  # the baseline of all
        (["fp32", "fp16"], [BAD, BAD], [], "train.py:3: RuntimeError: no kernel"),
        (["fp16"], [BAD], [], "train.py:3: RuntimeError: no kernel"),
        (["fp32"], [TOLD], [GOOD], [replace(GOOD, fails_with_gpu=BAD.error)]),
        (["fp32", "fp16"], [TOLD, TOLD], [GOOD, BAD], [replace(one, fails_with_gpu=BAD.error) for one in (GOOD, BAD)]),
        (["fp32"], [TOLD], [replace(BAD, error="other")], "train.py:3: RuntimeError: no kernel"),
    ],
)
def test_what_is_kept_where_a_script_fails(
    policies: list[str],
    first: list[ScriptTape],
    again: list[ScriptTape],
    expected: list[ScriptTape] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is recorded while the script is told of a GPU, then what is recorded while it is told what is true."""

    def recorded_now(requests: Sequence[TapeRequest], _: object) -> tuple[list[ScriptTape], str]:
        return (first if requests[0].gpu_present else again), ""

    monkeypatch.setattr(tapes, "_recorded", recorded_now)
    script = _written(tmp_path, "")
    requests = [TapeRequest(script=script, arguments=[], policy=policy) for policy in policies]
    if isinstance(expected, str):
        with pytest.raises(ScriptError, match=expected):
            recorded_tapes(requests)
    else:
        assert recorded_tapes(requests) == expected
