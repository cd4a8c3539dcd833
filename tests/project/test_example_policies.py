"""Every plain example trains under FP16 and one policy more, on small data in the real file formats."""

from __future__ import annotations

import gzip
import sys
from itertools import cycle
from pathlib import Path

import pytest

from forked_processes import in_fork
from mezzo.policy import PRESETS
from mezzo.records import CompareRecord, read_record
from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.pages import examples
from benchmarks.pages.examples import EXAMPLES, POLICIES, Example, comparison_of, make_data

OTHER_ENVIRONMENTS = {"imagenet_mobilenetv3.py", "keras_mobilenetv3.py", "paddle_mobilenetv3.py"}
"""These need timm, Keras and Paddle."""
WITHOUT_MASTERS = {"fp16-pure", "bf16-pure"}
"""They may fail: torch's AdamW has an eps that is 0 in FP16, and an average of weights beside the model keeps another format."""
IN_TURNS = [policy for policy in PRESETS if policy not in {"fp32", "fp16", *WITHOUT_MASTERS}]
MADE_BEFORE = {
    "digits.py",
    "keras_digits.py",
    "paddle_digits.py",
    "session_digits.py",
    "session_gan.py",
    "stdlib_gpt.py",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("small"))


def test_every_example_is_in_the_table() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {e.script for e in EXAMPLES} | OTHER_ENVIRONMENTS | MADE_BEFORE | {"small_data.py"}


def test_the_page_names_every_example_and_policy() -> None:
    page = examples.PAGE.read_text(encoding="utf-8")
    table = page.split(examples.BEGIN)[1].split(examples.END)[0]
    assert [f"`{e.script}`" in table for e in EXAMPLES] == [True] * len(EXAMPLES)
    assert [policy in table for policy in POLICIES[1:]] == [True] * len(POLICIES[1:])


def test_small_data_have_the_sizes_of_their_formats(data: Path) -> None:
    images = gzip.decompress((data / "mnist/train-images-idx3-ubyte.gz").read_bytes())
    assert images[:16] == bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (1500, 28, 28))
    assert len(images) == 16 + 1500 * 28 * 28
    assert (data / "cifar-10-batches-bin/data_batch_1.bin").stat().st_size == 300 * 3073
    assert len(list((data / "imagenet").glob("train/n*/*.jpeg"))) == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "third"), [*zip(EXAMPLES, cycle(IN_TURNS), strict=False)], ids=lambda one: getattr(one, "script", one)
)
def test_an_example_trains_under_fp16_and_one_policy_more(
    example: Example, third: str, data: Path, tmp_path: Path
) -> None:
    """``make examples`` runs every example under every policy, for its page."""
    policies = ("fp16", third)
    words = comparison_of(example, data, tmp_path / "out", seeds=1, policies=policies)
    limits = [
        word for word in example.arguments if word in ("--steps", "--max-steps")
    ]  # the last one that is given holds
    ended = in_fork([*words, *(part for limit in limits for part in (limit, "6"))], folder=ROOT)
    assert (tmp_path / "out" / "record.json").is_file(), ended.printed
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, CompareRecord)
    steps = {run.policy_shown: len(run.steps) for run in record.runs}
    assert set(steps) == set(policies)
    assert len(set(steps.values())) == 1, steps
    bad = {row.policy: row.reason for row in record.rows if row.verdict in ("failed", "diverged", "stopped_learning")}
    assert bad == {}
