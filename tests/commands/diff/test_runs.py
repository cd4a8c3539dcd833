"""What is run beside the two sides: candidates that could help, ranks that fail, and the search for a compiled module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers_diff import unedited
from helpers_values import record_at
from mezzo.cli import main
from mezzo.cli.script import Script
from mezzo.commands.diff.runs import DiffRuns, candidates, removed, smallest_part
from mezzo.commands.diff.sides import of_policies
from mezzo.policy import Policy
from mezzo.records import DiffRecord
from mezzo.studies.loop import Finished, Study
from mezzo.studies.side_by_side import one_after_another
from paths import SCRIPTS


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("bf16", "fp16"),
        ("fp16", "bf16"),
        ("bf16-pure:norms=compute", "fp16-pure:norms=compute"),
        ("bf16:fp32_modules=bf16_head", "fp16:fp32_modules=bf16_head"),
        ("fp16:init_scale=1024:widest=linear", "bf16:widest=linear"),
        ("fp8", None),
    ],
)
def test_the_other_16_bit_format(policy: str, other: str | None) -> None:
    a, *_ = unedited("masks")
    tried = [str(one) for what, one, _ in candidates(Policy.parse(policy), a) if " in place of " in what]
    assert tried == ([] if other is None else [str(Policy.parse(other))])


def test_modules_that_can_be_named() -> None:
    a, *_ = unedited("masks")
    weights = {event.module for event in a.events if event.kind == "weight"}
    named = [str(policy.fp32_modules[-1]) for _, policy, modules in candidates(Policy.parse("bf16"), a) if modules]
    assert len(named) == 2
    assert all(f"{name}.weight" in weights for name in named)


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


@pytest.mark.parametrize(
    ("apart", "of", "share"),
    [(1.0, 4.0, 0.75), (4.0, 1.0, -3.0), (0.0, 0.0, 0.0), (1.0, math.inf, 1.0), (math.inf, math.inf, 0.0)],
)
def test_the_share_of_a_distance_that_is_gone(apart: float, of: float, share: float) -> None:
    assert removed(apart, of=of) == share


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
