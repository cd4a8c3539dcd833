"""What a script's loaders say of its data set, and how fast they are without the model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers_predict import recorded, traced_in_forks
from mezzo.measure.predict.script import loaders
from mezzo.measure.predict.script.loaders import Loaders, data_set_of, rate_of, smallest_data
from mezzo.measure.predict.script.plan import ScriptPlan, script_plan
from mezzo.measure.predict.script.tapes import ScriptTape
from mezzo.records import DataSet, LoaderRate

TRAINS = """
import torch
from torch import nn
from torch.utils.data import *
from torch.utils.data.distributed import DistributedSampler

{data}
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for batch in {over}:
        optimizer.zero_grad()
        model({inputs}).square().mean().backward()
        optimizer.step()
"""
SAMPLES = 60
DATA = f"data = TensorDataset(torch.randn({SAMPLES}, 8))\n"
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(60):
            yield torch.zeros(8)
"""
ENTRIES = """
class Entries(Dataset):
    def __init__(self, number=60):
        self.number = number
    def __len__(self):
        return self.number
    def __getitem__(self, index):
        return {"x": torch.zeros(8), "index": index}
"""
ALWAYS = """
class Always(Sampler):
    def __iter__(self):
        while True:
            yield [0, 1, 2, 3]
"""


def script(data: str, *, over: str = "loader", inputs: str = "batch[0]") -> str:
    return TRAINS.format(data=data, over=over, inputs=inputs)


def known(folder: Path, text: str, **how: Any) -> DataSet | None:
    found: ScriptTape = recorded(folder, text, **how)
    assert found.tape is not None, found.error
    return found.data


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        ("DataLoader(data, 8)", 60),
        ("DataLoader(data, batch_size=8, shuffle=True, drop_last=True)", 60),
        ("DataLoader(data, 8, True, None, None, 2)", 60),  # two workers, without their name
        ("DataLoader(data, 8, sampler=SubsetRandomSampler(range(20)))", 20),
        ("DataLoader(data, 8, sampler=RandomSampler(data, replacement=True, num_samples=600))", 60),
        ("DataLoader(data, 8, sampler=WeightedRandomSampler(torch.ones(60), 40))", 40),
        ("DataLoader(data, 8, sampler=RandomSampler(data, num_samples=24))", 24),
        ("DataLoader(Subset(data, range(30)), 8)", 30),
        ("DataLoader(ConcatDataset([data, data]), 8)", 120),
        ("DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(range(40)), 8, False))", 40),
        ("DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 8, False))", 60),
        ("DataLoader(data, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7]])", 60),
    ],
)
def test_the_data_set_is_what_one_pass_draws(tmp_path: Path, loader: str, samples: int) -> None:
    assert known(tmp_path, script(f"{DATA}loader = {loader}")) == DataSet(samples=samples)


def test_a_batch_sampler_of_the_script_leaves_the_data_set(tmp_path: Path) -> None:
    assert known(tmp_path, script(f"{ALWAYS}{DATA}loader = DataLoader(data, batch_sampler=Always())")) == DataSet(
        samples=SAMPLES
    )


def test_a_stream_has_no_length_unless_it_says_so(tmp_path: Path) -> None:
    stream = script(f"{STREAM}loader = DataLoader(Stream(), 8)", inputs="batch")
    found = known(tmp_path, stream)
    assert found is not None
    assert (found.samples, found.reason) == (None, "it is read as a stream, without a length")
    sized = STREAM + "    def __len__(self):\n        return 60\n"
    assert known(tmp_path, script(f"{sized}loader = DataLoader(Stream(), 8)", inputs="batch")) == DataSet(samples=60)


def test_entries_that_are_batches_count_as_their_samples(tmp_path: Path) -> None:
    entries = ENTRIES.replace("torch.zeros(8)", "torch.zeros(16, 8)")
    text = script(f"{entries}loader = DataLoader(Entries(), batch_size=None)", inputs='batch["x"]')
    assert known(tmp_path, text) == DataSet(samples=60 * 16)


def test_a_distributed_sampler_shares_the_data_set(tmp_path: Path) -> None:
    sampler = "DistributedSampler(data, num_replicas=4, rank=0)"
    found = known(tmp_path, script(f"{DATA}loader = DataLoader(data, 8, sampler={sampler})"))
    assert found == DataSet(samples=SAMPLES, processes=4)


def test_of_several_loaders_the_smallest_counts_and_earlier_ones_do_not(tmp_path: Path) -> None:
    several = f"{DATA}few = TensorDataset(torch.randn(24, 8))\nnext(iter(DataLoader(Subset(data, [0]), 1)))\n"
    text = script(
        f"{several}one, two = DataLoader(data, 8), DataLoader(few, 8)", over="zip(one, two)", inputs="batch[0][0]"
    )
    assert known(tmp_path, text) == DataSet(samples=24, loaders=2)


def test_without_a_loader_nothing_is_known(tmp_path: Path) -> None:
    text = script("xs = torch.randn(60, 8)", over="xs.split(8)", inputs="batch")
    assert known(tmp_path, text) is None


def test_a_loader_that_was_made_by_hand_has_no_surprises() -> None:
    assert smallest_data([]) == (None, None)
    rows: Any = [torch.zeros(2)] * 5
    loader: Any = DataLoader(rows, 2)
    assert data_set_of(loader, 2) == DataSet(samples=5)


# --- rates -------------------------------------------------------------------------------------------------------------------


class Slow(Dataset[Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(2)


def test_the_rate_is_that_of_the_loader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "_MEASURED_S", 0.1)
    found = rate_of(DataLoader(Slow(0.002), 8), 0, batch=8)
    assert 100 < (found.samples_per_s or 0) <= 500  # 2 ms a sample at least; more on a busy machine
    assert found.batches >= 3


def test_workers_are_those_of_the_script() -> None:
    noted = Loaders()
    loader = DataLoader(Slow(0.0), 8)
    noted.made(loader, loader.dataset, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True})
    assert noted.restore(loader) == 2
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)

    copied, own = DataLoader(loader.dataset, 8), DataLoader(loader.dataset, 8)
    noted.made(copied, loader.dataset, {"num_workers": 0})  # a library's copy of the script's loader
    noted.made(own, loader.dataset, {})
    assert (noted.restore(copied), noted.restore(own)) == (2, 0)


def test_a_loader_that_is_too_slow_has_a_bound_and_one_that_fails_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "MOST_S", 0.2)
    late = rate_of(DataLoader(Slow(1.0), 8), 0, batch=8)
    assert (late.samples_per_s, late.is_bound, late.reason) == (8 / 0.2, True, "")

    def fails(_: object) -> Tensor:
        raise ValueError("no such file\nat all")

    failing = rate_of(DataLoader(Slow(0.0), 8, collate_fn=fails), 0, batch=8)
    assert failing.reason == "it fails outside of the training: ValueError: no such file"
    words: Any = ["a", "b"]
    texts = rate_of(DataLoader(words, 1), 0, batch=1)
    assert texts.reason == "its batches have no tensors"


def rates(folder: Path, text: str) -> ScriptPlan:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    with traced_in_forks():
        return script_plan(str(path), [], ["fp32", "fp16"], times_loader=True)


GLOBAL = """
xs = torch.randn(60, 8)
class Reads(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return xs[index], torch.tensor(1.0)
"""


@pytest.mark.parametrize(
    ("data", "inputs", "workers"),
    [
        (f"{DATA}loader = DataLoader(data, 8, num_workers=2)", "batch[0]", 2),
        (f"first = nn.Linear(1, 1)\n{DATA}loader = DataLoader(data, 8, True, None, None, 1)", "batch[0]", 1),
        (f"{ENTRIES}loader = DataLoader(Entries(), 8)", 'batch["x"]', 0),
        (f"{GLOBAL}loader = DataLoader(Reads(), 8)", "batch[0]", 0),
        ("data = [torch.randn(8) for _ in range(60)]\nloader = DataLoader(data, 8, drop_last=True)", "batch", 0),
        (f"{STREAM}loader = DataLoader(Stream(), 8)", "batch", 0),
        (
            f"{DATA}loader = DataLoader(data, 8, collate_fn=lambda rows: torch.stack([row[0] for row in rows]))",
            "batch",
            0,
        ),
    ],
    ids=["tensors", "after a module", "entries", "globals", "list", "stream", "collate"],
)
def test_a_scripts_loader_is_timed_with_its_workers(tmp_path: Path, data: str, inputs: str, workers: int) -> None:
    found = rates(tmp_path, script(data, inputs=inputs)).loader
    assert found is not None
    assert found.reason == ""
    assert found.workers == workers
    assert (found.samples_per_s or 0) > 50


def test_nothing_is_timed_without_a_loader_and_tapes_do_not_depend_on_it(tmp_path: Path) -> None:
    plan = rates(tmp_path, script("xs = torch.randn(60, 8)", over="xs.split(8)", inputs="batch"))
    assert (plan.loader, plan.data) == (None, None)
    path = tmp_path / "train.py"
    path.write_text(script(f"{DATA}loader = DataLoader(data, 8)"), encoding="utf-8")
    with traced_in_forks():
        timed, untimed = (script_plan(str(path), [], ["fp32"], times_loader=times) for times in (True, False))
    assert timed.tapes["fp32"].first == untimed.tapes["fp32"].first
    assert isinstance(timed.loader, LoaderRate)
    assert untimed.loader is None


def test_data_that_grow_with_the_batch_have_no_size(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    made = "import sys\nsize = int(sys.argv[1])\ndata = TensorDataset(torch.randn(size * 10, 8))\nloader = DataLoader(data, size)"
    path.write_text(script(made), encoding="utf-8")
    with traced_in_forks():
        plan = script_plan(str(path), ["{batch}"], ["fp32"], batch=8)
    assert plan.data == DataSet(reason="the script makes as much as the size of its batch asks for")


def test_a_batch_above_the_data_set_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(f"{DATA}loader = DataLoader(data, 8)"), encoding="utf-8")
    with traced_in_forks():
        plan = script_plan(str(path), [], ["fp32"], batch=100)
    note = next(one for one in plan.assumptions if one.what == "data set")
    assert (note.value, note.reason) == ("60 samples", "batch 100 is more than it has: the loader yields 60 at most")


def test_tensors_of_a_data_set_stay_shared() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, 2)
    loader = DataLoader(TensorDataset(x, x), 2)
    loaders.Zeros().fill(loader)
    one, two = loader.dataset.tensors  # type: ignore[attr-defined]
    assert one is two
    assert not isinstance(one, FakeTensor)
    assert not one.any()
