"""Batch sizes of scripts: what is derived from two tapes equals a third tape, and sizes that do not follow are reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_values import existing
from mezzo.errors import ScriptError, UsageError
from mezzo.gpus import gpu_named
from mezzo.measure.predict.plan import predict
from mezzo.measure.predict.script import plan as module
from mezzo.measure.predict.script.plan import ScriptPlan, script_plan
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest
from mezzo.measure.predict.tape import TrainingTape, _size_at

HEAD = """
import sys
import torch
from torch import nn

size = int(sys.argv[1])
x, y = torch.randn({samples}, 1, 8, 8), torch.randint(0, 2, ({samples},))
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
optimizer = torch.optim.AdamW(model.parameters())
"""
LOADER = """
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=size, shuffle=True, num_workers=2, persistent_workers=True)
for epoch in range(10):
    for number, (a, b) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        if number % {accumulated} == {accumulated} - 1:
            optimizer.step()
            optimizer.zero_grad()
"""
SLICES = """
for step in range(10):
    a, b = x[step * size : (step + 1) * size], y[step * size : (step + 1) * size]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(a), b).backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None) -> list[ScriptTape]:
        try:
            return [record_script(request) for request in requests]
        except Exception as error:  # as the process of a tape reports it
            raise ScriptError(str(error), hint="none") from error

    monkeypatch.setattr(module, "recorded_tapes", tapes)


def _script(folder: Path, body: str, *, samples: int = 256, accumulated: int = 1) -> str:
    path = folder / "train.py"
    text = HEAD.format(samples=samples) + body.format(accumulated=accumulated)
    path.write_text(text, encoding="utf-8")
    return str(path)


def _cost(tape: TrainingTape) -> list[tuple[object, ...]]:
    return [(op.name, op.flops, op.read_bytes, op.written_bytes, op.shape) for op in tape.operations]


def _said(plan: ScriptPlan, what: str) -> str:
    return next(f"{one.value}: {one.reason}" for one in plan.assumptions if one.what == what)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp16-master"])
def test_another_batch_has_the_tape_that_the_script_has_at_that_batch(policy: str, tmp_path: Path) -> None:
    script = _script(tmp_path, LOADER)
    plan = script_plan(script, ["8"], [policy])
    assert (plan.batch, plan.unit, plan.optimizer) == (8, "samples", "AdamW")
    assert _said(plan, "batch") == "8 samples: what the DataLoader yields"
    assert _said(plan, "other batch sizes").startswith("follow: ")
    wanted = existing(record_script(TapeRequest(script=script, arguments=["32"], policy=policy)).tape)
    found = plan.tapes[policy].at(32)
    assert _cost(found) == _cost(wanted)
    assert found.events == wanted.events
    assert [block.size_bytes for block in found.blocks] == [block.size_bytes for block in wanted.blocks]


def test_the_script_is_predicted_at_the_batch_that_is_named(tmp_path: Path) -> None:
    script = _script(tmp_path, LOADER)
    plan = script_plan(script, ["8"], ["fp32"], batch=64)
    found = predict(plan.tapes, gpu_named("t4"), "fp32", batch=plan.batch)
    assert found.throughput == pytest.approx(64 / (found.step_ms / 1e3))
    assert found.largest_batch is not None


@pytest.mark.parametrize("facts", [{"launched": True}, {"sized_at": ["train.py:9"]}])
def test_the_reason_why_other_sizes_do_not_follow_is_theirs(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module.recorded_tapes
    monkeypatch.setattr(module, "recorded_tapes", lambda *a, **k: [replace(one, **facts) for one in own(*a, **k)])
    found = _said(script_plan(_script(tmp_path, SLICES), ["8"], ["fp32"]), "other batch sizes")
    assert found.startswith("do not follow: neither a DataLoader nor a number in the script sets the size")


def test_batches_without_a_loader_do_not_follow(tmp_path: Path) -> None:
    script = _script(tmp_path, SLICES)
    plan = script_plan(script, ["8"], ["fp32"])
    assert plan.batch == 8
    assert _said(plan, "batch") == "8 samples: the first dimension of the model's inputs"
    assert _said(plan, "other batch sizes").startswith(
        "do not follow: neither a DataLoader nor a number in the script sets the size of its batch"
    )
    with pytest.raises(
        UsageError, match=r"--batch 64 cannot be predicted for .*neither a DataLoader.* 8 samples"
    ) as told:
        script_plan(script, ["8"], ["fp32"], batch=64)
    assert "--batch-size {batch}" in told.value.hint


PLAIN = """
import argparse
import torch
from torch import nn

{sizes}
model = nn.Sequential(nn.Linear(20, {hidden}), nn.ReLU(), nn.Linear({hidden}, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(512, 20)
for step in range(10):
    rows = torch.randint(0, 512, ({size},))
    optimizer.zero_grad()
    (model(x[rows]) - torch.zeros({size}, 1)).square().mean().backward()
    optimizer.step()
"""
DRAWN = """
import torch
from torch import nn

SIZE = 16
data = torch.randint(0, 32, (2000,))
model = nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Linear(8 * 12, 32))
optimizer = torch.optim.AdamW(model.parameters())


def batch():
    starts = torch.randint(len(data) - 13, (SIZE,))
    x = torch.stack([data[i : i + 12] for i in starts])
    return x, torch.stack([data[i + 12 : i + 13] for i in starts]).view(-1)


x, y = batch()
for step in range(10):
    loss = nn.functional.cross_entropy(model(x), y)
    x, y = batch()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARSED = """
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=48)
size = parser.parse_args().batch_size
"""
DEFAULTED = """
def rows_of(batch_size=48):
    return batch_size


size = rows_of()
"""


def test_a_loop_over_samples_that_draws_them_one_by_one_follows(tmp_path: Path) -> None:
    """Each sample's index is a number of the host: it is no memory of the step."""
    script, longer = tmp_path / "train.py", tmp_path / "longer.py"
    script.write_text(DRAWN, encoding="utf-8")
    longer.write_text(DRAWN.replace("SIZE = 16", "SIZE = 40"), encoding="utf-8")
    plan = script_plan(str(script), [], ["fp32"])
    assert plan.batch == 16
    assert _said(plan, "other batch sizes").startswith("follow: set by train.py:5; ")
    alone = script_plan(str(longer), [], ["fp32"])
    assert plan.tapes["fp32"].at(40).blocks == alone.tapes["fp32"].at(40).blocks


@pytest.mark.parametrize(
    ("sizes", "size", "hidden", "arguments", "where"),
    [
        ("", "48", 64, [], "train.py:11, train.py:13"),
        ("BATCH = 48", "BATCH", 64, [], "train.py:6"),
        ("BATCH = 48", "BATCH", 48, [], "train.py:6"),  # the width is 48 as well, and has no name
        (DEFAULTED, "size", 64, [], "train.py:7"),
        (PARSED, "size", 64, [], "train.py:8"),
        (PARSED, "size", 64, ["--batch-size", "48"], "--batch-size"),
        (PARSED, "size", 48, ["--batch-size=48"], "--batch-size"),
        (PARSED, "size", 48, ["-b", "48"], "-b"),
        ("", "48", 48, [], ""),  # which of the numbers is the batch's cannot be told
        ("import math\nsize = math.isqrt(2304)", "size", 64, [], ""),
    ],
)
def test_the_size_is_found_where_the_script_sets_it(
    sizes: str, size: str, hidden: int, arguments: list[str], where: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN.format(sizes=sizes, size=size, hidden=hidden), encoding="utf-8")
    plan = script_plan(str(script), arguments, ["fp32"])
    assert plan.batch == 48
    if not where:
        assert _said(plan, "other batch sizes").startswith("do not follow: neither")
        return
    assert _said(plan, "other batch sizes").startswith(f"follow: set by {where}; ")
    longer = script.with_name("longer.py")
    longer.write_text(
        PLAIN.format(sizes=sizes.replace("48", "96"), size=size.replace("48", "96"), hidden=hidden), encoding="utf-8"
    )
    words = [word.replace("48", "96") for word in arguments]
    wanted = existing(record_script(TapeRequest(script=str(longer), arguments=words, policy="fp32")).tape)
    assert _cost(plan.tapes["fp32"].at(96)) == _cost(wanted)


READS = """
import {imports}
import torch
from torch import nn


def read(name):
    with open(name) as file:
        return file.read()


settings = {settings}
model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    x = torch.randn({size}, 20)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
_JSON = '{"lr": 48,\n "train": {"batch": 48},\n "eval": {"batch": 48}}'


_TRAINED, _BY_PATH = "settings['train']['batch']", "json.loads(pathlib.Path('c.json').read_text())"
_CLASS = "class Settings:\n    batch_size = 48\n"
_WIDTH = "width: 48\ndata:\n  batch_size: 48  # 48\n"
_INI = "configparser.ConfigParser()\nsettings.read('c.ini')"
_FEATURES = (
    "yaml.safe_load(read('c.yaml'))\nnn.Linear = lambda a, b, f=nn.Linear: f(a, settings['batch_norm_features'] if b == 48 else b)"
    " if a == 20 else f(settings['batch_norm_features'], b)"
)


@pytest.mark.parametrize(
    ("file", "text", "imports", "settings", "size", "where"),
    [
        ("c.json", _JSON, "json", "json.loads(read('c.json'))", _TRAINED, "c.json:2, c.json:3"),
        ("c.json", _JSON, "json, pathlib", _BY_PATH, _TRAINED, "c.json:2, c.json:3"),
        # the width is a setting, too, whose name says so
        ("c.yaml", _WIDTH, "yaml", "yaml.safe_load(read('c.yaml'))", "settings['data']['batch_size']", "c.yaml:3"),
        ("c.ini", "[data]\nbatch = 48\n", "configparser", _INI, "settings.getint('data', 'batch')", "c.ini:2"),
        # both settings together change the model, each alone says which is the batch's
        ("c.yaml", "batch_norm_features: 48\nbatch: 48\n", "yaml", _FEATURES, "settings['batch']", "c.yaml:2"),
        ("own.py", _CLASS, "own", "own.Settings", "settings.batch_size", "own.py:2"),
        ("c.json", '{"rows": 48}', "json", "json.loads(read('c.json'))", "settings['rows']", ""),
    ],
)
def test_the_size_is_found_in_the_files_that_the_script_reads(
    file: str,
    text: str,
    imports: str,
    settings: str,
    size: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(
        request: TapeRequest,
    ) -> ScriptTape:  # a tape's own process has imported nothing of the script, and no optimizer is patched
        monkeypatch.delitem(sys.modules, Path(file).stem, raising=False)
        monkeypatch.setattr(torch.nn, "Linear", linear)
        return record_script(request)

    linear = torch.nn.Linear
    monkeypatch.setattr(module, "recorded_tapes", lambda requests, **_: [alone(request) for request in requests])
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text, encoding="utf-8")
    Path("train.py").write_text(READS.format(imports=imports, settings=settings, size=size), encoding="utf-8")
    plan = script_plan("train.py", [], ["fp32"])
    assert plan.batch == 48
    assert Path(file).read_text(encoding="utf-8") == text
    if not where:
        assert _said(plan, "other batch sizes").startswith(
            f"do not follow: neither a DataLoader nor a number in the script, nor in {file} sets the size of its batch"
        )
        return
    assert _said(plan, "other batch sizes").startswith(f"follow: set by {where}; ")
    for line in where.split(", "):
        number = int(line.rpartition(":")[2])
        lines = text.splitlines()
        lines[number - 1] = lines[number - 1].replace("48", "96")
        text = "\n".join(lines)
    Path(file).write_text(text, encoding="utf-8")
    wanted = existing(alone(TapeRequest(script="train.py", arguments=[], policy="fp32")).tape)
    assert _cost(plan.tapes["fp32"].at(96)) == _cost(wanted)


def test_a_library_s_own_files_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fonts.json").write_text('{"batch": 48}', encoding="utf-8")
    (tmp_path / "c.json").write_text('{"rows": 48}', encoding="utf-8")
    text = READS.format(imports="json", settings="json.loads(read('c.json'))", size="settings['rows']")
    (tmp_path / "train.py").write_text(f"open('cache/fonts.json').close()\n{text}", encoding="utf-8")
    assert _said(script_plan("train.py", [], ["fp32"]), "other batch sizes").startswith(
        "do not follow: neither a DataLoader nor a number in the script, nor in c.json sets the size of its batch"
    )


def test_the_side_of_an_image_is_no_batch(tmp_path: Path) -> None:
    body = HEAD.format(samples=256).replace("nn.Flatten(), nn.Linear(144, 2)", "nn.AdaptiveAvgPool2d(1), nn.Flatten()")
    body = body.replace("nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)", "nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)")
    script = tmp_path / "train.py"
    text = body.replace("size = int(sys.argv[1])", "").replace("torch.randn(256, 1, 8, 8)", "torch.randn(8, 1, 8, 8)")
    loop = "for step in range(9):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()\n"
    script.write_text(text + loop, encoding="utf-8")
    plan = script_plan(str(script), [], ["fp32"])
    assert plan.batch == 8
    assert _said(plan, "other batch sizes").startswith("do not follow: neither")


def test_an_argument_can_name_the_batch(tmp_path: Path) -> None:
    script = _script(tmp_path, SLICES)
    plan = script_plan(script, ["{batch}"], ["fp32"], batch=16)
    assert plan.batch == 16
    other = existing(plan.tapes["fp32"].second)
    assert other.batch == 8
    with pytest.raises(UsageError, match=r"arguments contain {batch}, but --batch is missing"):
        script_plan(script, ["{batch}"], ["fp32"])


def test_an_argument_that_the_script_ignores_is_refused(tmp_path: Path) -> None:
    script = _script(tmp_path, SLICES)
    with pytest.raises(UsageError) as told:
        script_plan(script, ["8", "{batch}"], ["fp32"], batch=8)
    said = f"{script} has the same batch with {{batch}} = 4 and 8: its arguments do not set the size"
    assert told.value.message == said
    assert "--batch-size {batch}" in told.value.hint


@pytest.mark.parametrize("wrong", [{"tape": None, "error": "no kernel"}, {"fails_with_gpu": "no kernel"}])
def test_a_trace_at_another_batch_that_is_not_of_the_same_kind_is_not_used(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails under one policy, or after it was told otherwise about the GPU."""
    own = module.recorded_tapes

    def tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None) -> list[ScriptTape]:
        found = own(requests, deadline_s=deadline_s)
        return found if requests[0].batch is None else [found[0], replace(found[1], **wrong)]

    monkeypatch.setattr(module, "recorded_tapes", tapes)
    plan = script_plan(_script(tmp_path, LOADER), ["8"], ["fp32", "fp16"])
    assert plan.refused == {}
    assert all(pair.second is None for pair in plan.tapes.values())
    assert _said(plan, "other batch sizes").startswith("do not follow: at batch 4 ")
    assert "fails: no kernel" in _said(plan, "other batch sizes")


def test_a_policy_under_which_the_script_fails_has_no_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.recorded_tapes

    def tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None) -> list[ScriptTape]:
        found = own(requests, deadline_s=deadline_s)
        return [replace(one, tape=None, error="no kernel") if request.policy == "fp16" else one
                for request, one in zip(requests, found, strict=True)]  # fmt: skip

    monkeypatch.setattr(module, "recorded_tapes", tapes)
    plan = script_plan(_script(tmp_path, LOADER), ["8"], ["fp32", "fp16"])
    assert (list(plan.tapes), plan.refused) == (["fp32"], {"fp16": "no kernel"})
    found = predict(plan.tapes, gpu_named("a100"), "bf16", batch=8, refused=plan.refused)
    assert (found.possible, found.reason) == (False, "fails under bf16, traced as fp16: no kernel")
    assert _said(plan, "other batch sizes").startswith("follow: ")


SPECTRAL = """
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return torch.view_as_real(torch.fft.rfft(self.layer(x.flatten(1))))

model = Spectral()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    optimizer.zero_grad()
    model(x[step * size : (step + 1) * size]).float().square().mean().backward()
    optimizer.step()
"""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_only_bf16_refuses_is_no_failure_of_fp16(tmp_path: Path) -> None:
    """NVIDIA's cuFFT transforms 64 numbers in FP16, and none in BF16, whose prediction rests on FP16's tape."""
    path = _script(tmp_path, SPECTRAL)
    line = Path(path).read_text(encoding="utf-8").splitlines().index(SPECTRAL.splitlines()[7]) + 1
    plan = script_plan(path, ["8"], ["fp32", "fp16"])
    error = f"train.py:{line}: NoKernelError: Unsupported dtype BFloat16"
    assert (list(plan.tapes), plan.refused) == (["fp32", "fp16"], {"bf16": error})
    reasons = {
        policy: predict(plan.tapes, gpu_named("h100"), policy, batch=8, refused=plan.refused).reason
        for policy in ("fp32", "fp16", "bf16", "fp8")
    }
    fails = {policy: f"fails under {policy}: {error}" for policy in ("bf16", "fp8")}
    assert reasons == {**dict.fromkeys(reasons, ""), **fails}


def test_accumulated_batches_count_together(tmp_path: Path) -> None:
    plan = script_plan(_script(tmp_path, LOADER, accumulated=4), ["8"], ["fp32", "fp16"])
    assert plan.tapes["fp16"].num_batches == 4
    assert _said(plan, "batch") == "8 samples, 4 of them an update: what the DataLoader yields"
    tape = plan.tapes["fp16"].first
    passes = [(op.phase, op.format) for op in tape.operations if op.name == "convolution"]
    assert passes == [("forward", "fp16")] * 4
    found = predict(plan.tapes, gpu_named("t4"), "fp16", batch=8)
    assert found.throughput == pytest.approx(4 * 8 / (found.step_ms / 1e3))


def test_a_smaller_last_batch_is_not_the_step_that_counts(tmp_path: Path) -> None:
    script = _script(tmp_path, LOADER, samples=12)  # 8, 4, 8
    plan = script_plan(script, ["8"], ["fp32"])
    assert plan.batch == 8
    assert len(plan.tapes["fp32"].first.step_starts) == 3
    assert next(op.shape.rows for op in plan.tapes["fp32"].first.operations if op.name == "addmm") == 8


PAIRS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(256, 8), batch_size=8):
    z = model(x)
    loss = nn.functional.cross_entropy(z @ z.t(), torch.arange(len(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_of_all_pairs_grows_with_the_square_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PAIRS)
    plan = script_plan(str(path), [], ["fp32"])
    assert "compare samples with each other grow with its square" in _said(plan, "other batch sizes")
    for batch in (2, 32, 128):
        text = PAIRS.replace("batch_size=8", f"batch_size={batch}")
        path = tmp_path / f"train{batch}.py"
        path.write_text(text)
        wanted = existing(record_script(TapeRequest(script=str(path), arguments=[], policy="fp32")).tape)
        found = plan.tapes["fp32"].at(batch)
        for one, other in zip(found.operations, wanted.operations, strict=True):
            assert (one.name, one.flops, one.shape) == (other.name, other.flops, other.shape)
            assert one.written_bytes == other.written_bytes
        assert [block.size_bytes for block in found.blocks] == [block.size_bytes for block in wanted.blocks]
    largest = existing(predict(plan.tapes, gpu_named("t4"), "fp32", batch=8).largest_batch)
    assert 4 * largest**2 < 16 * 2**30


@pytest.mark.parametrize(
    "size",
    [
        lambda b: 4 * b,
        lambda b: 100 + 3 * b,
        lambda b: 7,
        lambda b: 0,
        lambda b: 8 * (b - 1),  # neighbours
        lambda b: b * b,
        lambda b: 4 * b * b + 8 * b,
        lambda b: b * (b - 1) // 2,  # pairs
    ],
)
@pytest.mark.parametrize("sizes", [(32, 16), (32, 48), (9, 4)])
def test_a_size_at_another_batch(size: Callable[[int], int], sizes: tuple[int, int]) -> None:
    one, other = ((b, size(b)) for b in sizes)
    for batch in (2, 7, 64, 1000):
        assert _size_at(batch, one, other) == size(batch)


def test_half_a_batch_rounded_down_grows_evenly() -> None:
    assert _size_at(1000, (7, 3), (3, 1)) == 499  # the line through both


def test_a_script_that_casts_itself_is_said_to(tmp_path: Path) -> None:
    cast = SLICES.replace("model(a)", "model.bfloat16()(a.bfloat16()).float()")
    what = "the script's own precision"
    assert _said(script_plan(_script(tmp_path, cast), ["8"], ["fp32"]), what).startswith(
        "100% of the FLOPs in bf16: it casts its model or its data itself"
    )
    plan = script_plan(_script(tmp_path, SLICES), ["8"], ["fp32", "bf16"])
    assert what not in [one.what for one in plan.assumptions]


def test_an_argument_that_sets_the_batch_and_no_other_size_is_named(tmp_path: Path) -> None:
    body = SLICES.replace("for step", "assert size == 8, 'eight only'\nfor step", 1)
    script = _script(tmp_path, body.replace("size", "int(sys.argv[2])"))
    Path(script).write_text(Path(script).read_text().replace("size = int(sys.argv[1])", ""), encoding="utf-8")
    plan = script_plan(script, ["--batch-size", "8"], ["fp32"])
    said = _said(plan, "other batch sizes")
    assert said.startswith("do not follow: --batch-size seems to set it, but with 4 in place of 8 ")
    assert "eight only" in said
