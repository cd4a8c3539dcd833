"""Reading a metric from output, and naming it by its pattern."""

from __future__ import annotations

import io
import json
import math
import sys
import traceback
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import mezzo
from mezzo.launch.recording import MetricReader, MetricStream, beginning_of, name_of, print_error, sentence_of
from mezzo.records import Metric

NAN, INF = math.nan, math.inf


def read(pattern: str, *lines: str) -> Metric:
    reader = MetricReader(pattern, lambda: 7)
    for line in lines:
        reader.line(line)
    return reader.metric()


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"acc=([0-9.]+)", "acc"),
        (r"test loss[: ]+([0-9.]+)", "test loss"),
        (r"val acc: (\S+)", "val acc"),
        (r"\bacc +([0-9.]+)", "acc"),
        (r"(?i)Val(?:idation)? Acc@1 ([\d.]+)", "Validation Acc@1"),
        (r"(?:val|test) acc (.*)", "val test acc"),
        (r"(\d+\.\d+)% correct", "correct"),
        (r"(?P<accuracy>[0-9.]+)", "accuracy"),
        (r"(?P<val_loss>[0-9.]+) \|", "val loss"),
        (r"Epoch \d+.*?test_acc=([0-9.]+)", "Epoch test_acc"),
        (r"(?<=loss )([0-9.]+)", "loss"),
        (r"\[test\] IoU ([0-9.]+)", "test IoU"),
        (r"top-1 acc ([0-9.]+)", "top-1 acc"),
        (r"eval/f1\D+([0-9.]+)", "eval f1"),
        (r"'eval_loss': ([0-9.]+)", "eval_loss"),
        (r"\x1b\[1m *loss (\S+)", "1m loss"),
        (r"^([0-9.]+)$", "metric"),
    ],
)
def test_a_metric_has_the_words_of_its_pattern(pattern: str, name: str) -> None:
    assert name_of(pattern) == name


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        ("acc +([0-9.]+)", "acc "), ("acc: ([0-9.]+)", "acc: "), ("accs?: (.*)", "acc"), ("acc*: (.*)", "ac"), ("a{0}b(.)", ""),
        ("^acc (.*)", ""), ("(acc) (.*)", ""), ("acc|loss (.*)", ""), ("(?i)acc (.*)", ""), (r"acc\. (.*)", "acc"), ("top1 (.*)", "top"),
        ("[Aa]cc (.*)", ""), ("loss-(.*)", "loss"), ("", ""),
    ],
)  # fmt: skip
def test_the_letters_that_every_match_begins_with(pattern: str, letters: str) -> None:
    assert beginning_of(pattern) == letters


def test_colours_inside_the_first_letters_hide_no_metric() -> None:
    reader = MetricReader("acc ([0-9.]+)", lambda: 3)
    for line in ("a\x1b[1mcc \x1b[0m0.5", "no metric", "acc nan", "\tacc 0.25"):
        reader.line(line)
    assert str(reader.metric().values) == "[0.5, nan, 0.25]"


@pytest.mark.parametrize(
    ("pattern", "lines", "values"),
    [
        (r"acc=([0-9.]+)", ["acc=0.5 acc=0.75"], [0.5, 0.75]),
        (r"acc=([0-9.]+)", ["acc=0.5", "acc=nan", "acc=inf", "acc=-inf"], [0.5, NAN, INF, -INF]),
        (r"acc=(\d+)", ["acc=NaN"], [NAN]),
        (r"loss (-?[0-9.]+)", ["loss -Infinity", "loss nan"], [-INF, NAN]),
        (r"info ([0-9.]+)", ["info 5"], [5.0]),  # a word that begins as infinity does
        (r"loss ([0-9.]+)", ["loss 1.2e-05, lr 3", "loss 3E+2"], [1.2e-05, 300.0]),
        (r"loss ([0-9.e+-]+)", ["loss 1.2e-05"], [1.2e-05]),
        (
            r"steps ([0-9.]+)",
            ["steps 1,234.5", "steps 12,345,678", "steps 1, 2", "steps 3,4"],
            [1234.5, 12345678.0, 1.0, 3.0],
        ),
        (r"acc ([0-9.]+)", ["acc \x1b[32m0.97\x1b[0m", "\x1b]0;title\x07acc 0.5\x08"], [0.97, 0.5]),
        (r"\x1b\[32m([0-9.]+)", ["acc \x1b[32m0.97"], [0.97]),
        (r"acc (\S+)", ["acc 97.5%"], [97.5]),
        (r"a(?:b(\d))?", ["a ab1"], [1.0]),  # the group took no part in the first match
    ],
)
def test_numbers_are_read_whole(pattern: str, lines: list[str], values: list[float]) -> None:
    metric = read(pattern, *lines)
    assert str(metric.values) == str(values)  # nan is not equal to nan
    assert (metric.steps, metric.text) == ([7] * len(values), None)


@pytest.mark.parametrize(
    ("line", "percent"), [("acc 97.5%", True), ("acc 97.5 %", True), ("acc 97.5", False), ("acc 97.5 of 100%", False)]
)
def test_a_percent_sign_is_noted(line: str, percent: bool) -> None:
    assert read(r"acc ([0-9.]+)", line).percent == read(r"acc (\S+)", line).percent == percent


@pytest.mark.parametrize(
    ("lines", "values", "text"),
    [
        (["acc 0.5", "acc n/a"], [0.5], "n/a"),
        (["acc n/a", "acc 0.5"], [0.5], None),
        (["acc 0,97"], [], "0,97"),
        (["acc " + "x" * 90], [], "x" * 40),
        (["other"], [], None),
    ],
)
def test_text_in_place_of_the_last_number_is_kept(lines: list[str], values: list[float], text: str | None) -> None:
    metric = read(r"acc (\S+)", *lines)
    assert (metric.values, metric.text) == (values, text)


def test_a_decimal_comma_is_no_number_that_was_cut() -> None:
    assert read(r"acc ([0-9.]+)", "acc 0,97").text == "0,97"


def test_lines_are_read_however_they_are_written() -> None:
    reader, stream = MetricReader(r"acc ([0-9.]+)", lambda: 1), io.StringIO()
    watched = MetricStream(stream, reader.line)
    assert watched.write("acc 0.") == 6
    watched.writelines(["5\racc 0.6\nacc", " 0.7"])
    assert reader.metric().values == [0.5, 0.6]
    watched.finish()
    assert reader.metric().values == [0.5, 0.6, 0.7]
    assert (stream.getvalue(), watched.getvalue()) == ("acc 0.5\racc 0.6\nacc 0.7",) * 2


# --- Errors with which torch reports a failed process, in one sentence ---


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


# --- What a user sees of a traceback: the script's frames and its libraries', without Mezzo's ---


MEZZO = Path(mezzo.__file__).parent
PLACES = [
    # file, whether its frame is shown
    (MEZZO / "launch" / "torch" / "forward.py", False),
    (MEZZO.with_name("mezzo_models") / "layers.py", True),  # another package whose name begins alike
    (Path("/home/me/train.py"), True),
]


@pytest.mark.parametrize(("file", "shown"), PLACES)
def test_frames_of_mezzo_are_not_shown(file: Path, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.extend(traceback.format_exception(*error)))
    try:
        exec(compile("1 / 0", str(file), "exec"), {})
    except ZeroDivisionError as error:
        print_error(error)
    assert (str(file) in "".join(printed)) is shown
