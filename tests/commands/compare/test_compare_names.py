"""Policies keep the names that were typed: in records, tables, pages, folders and the next commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.cli.options import typed_name
from mezzo.commands.compare.command import _folders, _parse_policies
from mezzo.errors import PolicyError
from mezzo.policy import Policy
from mezzo.records import AnyRecord, CompareRecord, read_record
from mezzo.report.pages import page_of
from paths import SCRIPTS

PLAIN = str(SCRIPTS / "plain.py")


def shown(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[AnyRecord, str, str]:
    """Return the record of a command, what it printed, and its page."""
    with children_in_this_process():
        cli.main([words[0], "--out", "out", *words[1:], PLAIN])
    page = Path("out/report.html").read_text(encoding="utf-8")
    return read_record(Path("out/record.json")), capsys.readouterr().out, page


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept.toml").write_text('policy = "bf16"\nfp32_modules = ["0"]\n')


def test_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    record, printed, page = shown("compare", "--policies", "O0,O1,kept.toml", "--seeds", "1", capsys=capsys)
    assert isinstance(record, CompareRecord)
    names = [("fp32", "O0"), ("fp16", "O1"), ("bf16:fp32_modules=0", "kept.toml")]
    assert [(row.policy, row.policy_typed) for row in record.rows] == names
    assert [(run.policy, run.policy_typed) for run in record.runs] == names
    assert (record.baseline, record.baseline_shown) == ("fp32", "O0")
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == [
        "O0-seed0",
        "O1-seed0",
        "kept.toml-seed0",
    ]
    meaning = "O0 stands for fp32, O1 stands for fp16 and kept.toml stands for bf16:fp32_modules=0."
    for text in (" ".join(printed.split()), page):
        assert text.count(meaning) == 1
    rest = printed.replace("\n", " ").replace(meaning, "")
    assert " fp16:fp32" not in rest
    assert "against" not in rest or "O0" in rest
    assert all(
        f"--policies O0,{step.command.split('O0,')[1].split()[0]}" in step.command for step in page_of(record).steps
    )


@pytest.mark.parametrize("command", ["run", "audit", "diagnose", "ranges", "fallback"])
def test_other_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    record, printed, page = shown(command, "--verbose", "--policy", "16-mixed", capsys=capsys)
    owner = record if command in ("run", "ranges", "fallback") else record.run  # type: ignore[union-attr]
    assert (owner.policy, owner.policy_typed, owner.policy_shown) == ("fp16", "16-mixed", "16-mixed")  # type: ignore[union-attr]
    assert "16-mixed" in printed
    assert "16-mixed" in page
    assert "16-mixed (fp16)" in printed or "16-mixed stands for it" in " ".join(printed.split())
    assert any("16-mixed" in step.command for step in page_of(record).steps)


def test_the_text_of_the_record_is_no_other_name(capsys: pytest.CaptureFixture[str]) -> None:
    record, printed, _ = shown("run", "--policy", " fp16 ", capsys=capsys)
    assert record.policy_typed == ""  # type: ignore[union-attr]
    assert "stands for" not in printed


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("fp16:fp32_modules=Head", ""),
        (" FP16:fp32_modules=Head ", ""),
        ("O1", "O1"),
        ("fp16:fp32_modules=Head:growth_interval=2000", "fp16:fp32_modules=Head:growth_interval=2000"),
    ],
)
def test_a_name_in_another_case_is_the_same_name(text: str, typed: str) -> None:
    assert typed_name(text, Policy.parse(text.strip())) == typed


def test_two_names_of_one_policy_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = _parse_policies("fp32, O1,16-mixed,fp16,O1")
    assert {text: one.name for text, one in asked.items()} == {"fp32": "fp32", "fp16": "O1"}
    assert capsys.readouterr().err.splitlines() == [
        "mezzo: 16-mixed and O1 are the same policy, fp16: it runs once, as O1",
        "mezzo: fp16 and O1 are the same policy, fp16: it runs once, as O1",
    ]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PolicyError):
        _parse_policies("fp32,O9")


def test_each_policy_has_folders_of_its_own() -> None:
    long = "+".join(f"layer{n}" for n in range(20))
    Path("a").mkdir()
    for name in ("a/kept.toml", "a_kept.toml"):
        Path(name).write_text(f'policy = "{"bf16" if "/" in name else "fp16"}"\n')
    asked = _parse_policies(
        f"a/kept.toml,a_kept.toml,fp16:fp32_modules={long},fp16:fp32_modules={long}+x,fp16:fp32_modules=a.*+b?"
    )
    names = [*_folders(asked).values()]
    assert len(set(names)) == len(names) == 5
    assert names[:2] == ["a_kept.toml", "a_kept.toml_2"]
    assert names[-1] == "fp16_fp32_modules=a._+b_"
