"""Errors with which torch reports a failed process, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from mezzo.launch.recording import sentence_of

SIMPLE = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "train.py", line 13, in work
    raise ValueError("batch 5 has a label of 17")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: batch 5 has a label of 17
"""
CHAINED = f"""{SIMPLE}
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 15, in work
    raise RuntimeError
RuntimeError: two lines:
  the second
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SIMPLE, "process 1: ValueError: batch 5 has a label of 17"),
        (CHAINED, "process 1: RuntimeError: two lines:\n  the second"),
        ("no traceback", "process 1: no traceback"),
    ],
)
def test_a_spawned_process_gives_its_own_exception(text: str, expected: str) -> None:
    assert sentence_of(ProcessRaisedException(text, error_index=1, error_pid=7)) == expected


def test_other_errors_are_type_and_message() -> None:
    assert sentence_of(KeyError("lr")) == "KeyError: 'lr'"
    assert sentence_of(AssertionError()) == "AssertionError"
    ended = ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 7, -9, "SIGKILL")
    assert sentence_of(ended) == "process 1 terminated with signal SIGKILL"


ELSEWHERE = "; see the output above; `torchrun ... -m mezzo` would record the reason"


@pytest.mark.parametrize(
    ("left", "exit_code", "expected"),
    [
        (None, 1, f"rank 1: it ended with exit code 1{ELSEWHERE}"),
        (None, -9, f"rank 1: it ended with signal SIGKILL{ELSEWHERE}"),
        ("ValueError: bad label", 1, "rank 1: ValueError: bad label"),
        (
            {"message": "ValueError: bad label", "extraInfo": {"py_callstack": "Trace", "timestamp": "5"}},
            1,
            "rank 1: ValueError: bad label",
        ),
    ],
)
def test_torchrun_gives_the_first_failure(left: object, exit_code: int, expected: str, tmp_path: Path) -> None:
    first, second = tmp_path / "1" / "error.json", tmp_path / "0" / "error.json"
    if left is not None:
        first.parent.mkdir()
        first.write_text(json.dumps({"message": left, "timestamp": 5}), encoding="utf-8")
    failures = {1: ProcessFailure(1, 11, exit_code, str(first)), 0: ProcessFailure(0, 10, 1, str(second))}
    failures[0].timestamp = failures[1].timestamp + 5
    assert sentence_of(ChildFailedError("train.py", failures)) == expected
