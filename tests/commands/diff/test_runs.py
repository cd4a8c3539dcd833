"""What is run beside the two sides: the control, ranks that fail, and the search for a compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import record_builders as build
from helpers_diff import unedited
from helpers_values import record_at
from mezzo.cli import main
from mezzo.cli.script import Script
from mezzo.commands.diff.runs import DiffRuns, smallest_part
from mezzo.commands.diff.sides import Side, of_policies
from mezzo.observe.values.log import ValuesLog
from mezzo.records import DiffRecord, Effective
from mezzo.studies.loop import Finished, Study
from mezzo.studies.side_by_side import one_after_another
from paths import SCRIPTS


@pytest.mark.parametrize(
    ("a", "b", "second"),
    [
        ("fp32", "bf16", True),
        ("bf16", "fp32", False),
        ("fp16", "bf16", True),
        ("bf16", "fp16", False),
        ("as-is", "fp16", True),
        ("fp16", "as-is", False),
        ("bf16", "bf16:fp32_modules=head", True),
        ("fp8", "bf16", False),
    ],
)
def test_whose_rounding_is_measured(a: str, b: str, second: bool, tmp_path: Path) -> None:
    sides = of_policies(Script(target="train.py"), f"{a},{b}")
    runs = DiffRuns(
        a=sides[0],
        b=sides[1],
        folder=tmp_path,
        study=Study(one_after_another, Finished(tmp_path, {})),
        steps=(1,),
        say=print,
    )
    assert runs.measures_second is second


ARITHMETIC = [
    # sides, what their runs were, what runs again
    ("bf16,mxfp8", (False, True), ["a bf16:arithmetic=emulated"]),
    ("nvfp4,bf16", (True, False), ["b bf16:arithmetic=emulated"]),
    ("bf16:fp32_modules=a,fp8-block", (False, True), ["a bf16:arithmetic=emulated:fp32_modules=a"]),
    ("bf16,mxfp8", (True, True), []),  # a CPU without BF16
    ("bf16,mxfp8", (False, False), []),
    ("fp32,mxfp8", (False, True), []),  # nothing to emulate
    ("as-is,mxfp8", (False, True), []),
    ("bf16:arithmetic=native,mxfp8", (False, True), []),  # asked for
    ("bf16,fp16", (False, True), []),
]


@pytest.mark.parametrize(("typed", "emulated", "again"), ARITHMETIC)
def test_products_in_16_bits_beside_blocks_are_of_one_arithmetic(
    typed: str, emulated: tuple[bool, bool], again: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = of_policies(Script(target="train.py"), typed)
    study = Study(one_after_another, Finished(tmp_path, {}))
    runs = DiffRuns(a=sides[0], b=sides[1], folder=tmp_path, study=study, steps=(1,), say=print)
    for name, one in zip("ab", emulated, strict=True):
        runs.records[name] = build.run_record("fp32", effective=Effective(emulated=one))
    ran: list[str] = []

    def log(own: DiffRuns, name: str, side: Side, what: str, **settings: object) -> None:
        ran.append(f"{name} {side.policy}")

    monkeypatch.setattr(DiffRuns, "_log", log)
    runs._in_one_arithmetic(ValuesLog(), ValuesLog())
    assert ran == again
    names = dict(zip("ab", typed.split(","), strict=True)) | dict(one.split(" ") for one in again)
    assert (runs.a.name, runs.b.name) == (names["a"], names["b"])


def test_the_smallest_part() -> None:
    a, *_ = unedited("masks")
    weights = [event.module for event in a.events if event.kind == "weight"]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in weights))
    assert len(modules) > 2
    for module in modules:
        asked: list[Sequence[str]] = []

        def differs(names: Sequence[str], module: str = module, asked: list[Sequence[str]] = asked) -> bool:
            asked.append(names)
            return any(f"{module}.".startswith(f"{name}.") for name in names)

        assert smallest_part(a, differs) == [module]
    assert smallest_part(a, lambda names: False) == []


def test_the_rank_that_failed_first_is_named_and_the_others_do_not_wait(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (SCRIPTS / "diff" / "processes.py").read_text(encoding="utf-8")
    text = text.replace("torch.manual_seed(0)", "if rank == 1:\n    raise SystemExit(3)\ntorch.manual_seed(0)")
    script.write_text(text)
    assert main(["diff", "--ranks", "2,1", "--out", str(tmp_path / "out"), str(script)]) == 3
    record = record_at(tmp_path / "out" / "record.json", DiffRecord)
    assert record.verdict == "failed"
    assert record.why.startswith("2 processes: ")
    assert not (tmp_path / "out" / "b").exists()


@pytest.mark.slow
def test_the_module_whose_compilation_begins_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diff", "--compile", "--out", str(tmp_path / "out"), str(SCRIPTS / "diff" / "compiled.py")]
    assert main(command) == 1
    record = record_at(tmp_path / "out" / "record.json", DiffRecord)
    assert (record.verdict, record.compiled_alone) == ("beyond rounding", ["2"])
    first = record.beginnings[0]
    assert (first.b.op, first.b.step, first.by, first.explains) == ("loss", 1, "values", None)
    assert "It begins with 2 compiled alone, the smallest part found." in capsys.readouterr().out
