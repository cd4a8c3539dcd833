"""What a prediction suggests: a check of the script for the fastest GPU, and checkpointing where it does not fit."""

from __future__ import annotations

import shlex

import pytest

import record_builders as build
from mezzo import cli
from mezzo.records import Prediction
from mezzo.report.pages import page_of

GIB = 2**30
TYPED = ["mezzo", "predict", "--gpus", "t4", "--batch", "64", "train.py", "--batch-size", "{batch}"]
ON_T4 = Prediction(gpu="t4", gpu_bytes=16 * GIB, policy="fp16", possible=True, fits=True, throughput=10.0)
TOO_LARGE = ON_T4.model_copy(
    update={"fits": False, "device_bytes": 20 * GIB, "memory_bytes": {"activations": 12 * GIB}, "throughput": 9.0}
)
HOPELESS = TOO_LARGE.model_copy(update={"memory_bytes": {"parameters": 18 * GIB, "activations": GIB}})

CASES = {
    "it fits with room to spare": ([ON_T4], ["mezzo check --gpu t4 train.py --batch-size 64"]),
    "it just fits": (
        [ON_T4.model_copy(update={"device_bytes": 9 * GIB})],
        [
            "mezzo check --gpu t4 train.py --batch-size 64",
            "mezzo compare --policies fp16 --checkpoint full train.py --batch-size 64",
        ],
    ),
    # 16 GiB less 13% is 13.92 GiB, of which 8 GiB go to the rest.
    "it does not": ([TOO_LARGE], ["mezzo run --policy fp16 --checkpoint 5.9GiB train.py --batch-size 64"]),
    "one fits, one does not": (
        [ON_T4.model_copy(update={"policy": "bf16"}), TOO_LARGE],
        [
            "mezzo check --gpu t4 train.py --batch-size 64",
            "mezzo run --policy fp16 --checkpoint 5.9GiB train.py --batch-size 64",
        ],
    ),
    "what else it needs does not fit either": ([HOPELESS], []),
    "the batch of the CPU here": ([ON_T4.model_copy(update={"gpu": "cpu", "fits": False})], []),
}


@pytest.mark.parametrize(("predictions", "commands"), CASES.values(), ids=CASES)
def test_what_to_type_next(predictions: list[Prediction], commands: list[str]) -> None:
    record = build.predict_record(command=TYPED, model="train.py", batch=64, predictions=predictions)
    steps = page_of(record).steps
    assert [one.command for one in steps] == commands
    for one in steps:  # the options exist: help stops before anything runs
        words = shlex.split(one.command)
        assert cli.main([words[1], "--help"]) == 0


@pytest.mark.parametrize(
    ("typed", "kept"),
    [("bf16", "--policies bf16 "), ("fp32,fp16", "--policies fp32,fp16 "), ("fp32", ""), ("", "")],
)
def test_the_check_tries_the_policies_that_were_typed(typed: str, kept: str) -> None:
    words = [*TYPED[:2], *(["--policies", typed] if typed else []), *TYPED[2:]]
    record = build.predict_record(command=words, model="train.py", batch=64, predictions=[ON_T4])
    assert page_of(record).steps[0].command == f"mezzo check --gpu t4 {kept}train.py --batch-size 64"


def test_the_check_has_the_variables_that_choose_the_script() -> None:
    here = build.environment(variables={"PYTHONPATH": "lib", "OMP_NUM_THREADS": "1"})
    record = build.predict_record(command=TYPED, model="train.py", batch=64, predictions=[ON_T4], environment=here)
    assert page_of(record).steps[0].command == "PYTHONPATH=lib mezzo check --gpu t4 train.py --batch-size 64"


def test_a_model_by_name_has_no_script_to_run() -> None:
    words = ["mezzo", "predict", "--model", "timm:resnet18"]
    assert page_of(build.predict_record(command=words, model="timm:resnet18", predictions=[ON_T4])).steps == []
