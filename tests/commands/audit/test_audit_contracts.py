"""``mezzo audit --expect`` and ``--write-expect`` from the command line, in one process and in two."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked_processes import in_fork, in_forks
from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.records import AuditRecord, CheckedContract, read_record
from paths import SCRIPTS

PLAIN = str(SCRIPTS / "plain.py")
CASES = str(SCRIPTS / "contract_cases.py")
RANKS = SCRIPTS / "contract_ranks.py"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "130")


def audit(*words: str, out: str = "out") -> int:
    with children_in_this_process():
        return cli.main(["audit", "--out", out, *words])


def contract_in(folder: Path) -> CheckedContract:
    record = read_record(folder / "record.json")
    assert isinstance(record, AuditRecord)
    assert record.contract is not None
    return record.contract


def test_a_contract_that_was_written_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--write-expect", "precision.toml", PLAIN, "4", out="written") == 0
    assert "wrote precision.toml; mezzo audit --expect precision.toml checks it" in capsys.readouterr().err
    tables = ["weights", "gradients", "optimizer_state", "activations"]
    text = "\n\n".join(["# The formats of plain.py", *(f'[{table}]\n"*" = "fp32"' for table in tables)])
    assert Path("precision.toml").read_text(encoding="utf-8") == f"{text}\n"
    assert audit("--expect", "precision.toml", PLAIN, "4") == 0
    assert "plain.py keeps precision.toml: 20 tensors." in capsys.readouterr().out
    contract = contract_in(tmp_path / "out")
    assert (contract.file, contract.breaches) == ("precision.toml", [])


def test_a_breach_is_exit_code_1_and_a_row_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("precision.toml").write_text('[buffers]\n"*" = "fp32"\n[ema]\n"*" = "fp32"\n', encoding="utf-8")
    assert audit("--expect", "precision.toml", CASES, "buffers", "planted") == 1
    printed = capsys.readouterr().out
    number = 1 + next(n for n, line in enumerate(Path(CASES).read_text().splitlines()) if "PLANTED buffers" in line)
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "contract_cases.py does not keep precision.toml: 2 breaches in 25 tensors." in printed
    assert f"1.mean buffers fp32 bf16 set-up, step 1 contract_cases.py:{number}" in rows
    assert '"*" ema fp32 nothing has this name' in rows
    assert "1.mean is in bf16, expected fp32" in Path("out/report.html").read_text(encoding="utf-8")


def test_a_script_shorter_than_the_audited_step_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("precision.toml").write_text('weights = "fp32"\n', encoding="utf-8")
    assert audit("--expect", "precision.toml", PLAIN, "1") == 0
    assert "plain.py keeps precision.toml" in capsys.readouterr().out


def test_a_script_that_fails_keeps_its_exit_code_and_writes_no_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    source = Path(PLAIN).read_text(encoding="utf-8").replace("report(", "raise SystemExit(5)\nreport(")
    script.write_text(f"import sys\nsys.path.append({str(SCRIPTS)!r})\n{source}", encoding="utf-8")
    Path("expected.toml").write_text('weights = "bf16"\nbuffers = "fp32"\n', encoding="utf-8")
    assert audit("--expect", "expected.toml", "--write-expect", "precision.toml", str(script), "4") == 5
    assert "precision.toml was not written, because the script failed" in capsys.readouterr().err
    assert not Path("precision.toml").exists()


@pytest.mark.slow
def test_processes_that_the_script_starts_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meet").mkdir()
    monkeypatch.setenv("MEETING", str(tmp_path / "meet"))
    Path("precision.toml").write_text('weights = "bf16"\n[reduction]\n"*" = "fp32"\n', encoding="utf-8")
    ended = in_fork(
        ["audit", "--out", "out", "--expect", "precision.toml", str(SCRIPTS / "spawns.py"), "mp.spawn"], folder=tmp_path
    )
    assert ended.code == 1, ended.printed
    found = contract_in(tmp_path / "out")
    assert {(b.role, b.ranks[0], b.ranks[-1]) for b in found.breaches} == {("weights", 0, 1)}
    assert {one.role for one in found.formats} >= {"weights", "gradients", "reduction"}


MISTAKES = [
    # words before the script, what the error says
    (("--expect", "none.toml"), "none.toml cannot be read"),
    (("--expect", "wrong.toml"), "wrong.toml: [weigths] is no role of a tensor"),
    (("--write-expect", "folder/precision.toml"), "--write-expect folder/precision.toml: there is no folder folder"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_ends_the_command_before_anything_runs(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.toml").write_text('weigths = "fp32"\n', encoding="utf-8")
    assert audit(*words, PLAIN) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not Path("out").exists()


# --- two processes -----------------------------------------------------------------------------------------------------------------


def line_of(role: str) -> str:
    lines = RANKS.read_text(encoding="utf-8").splitlines()
    return f"{RANKS}:{1 + next(n for n, line in enumerate(lines) if role in line.partition('# PLANTED')[2].split())}"


BOTH = [0, 1]
EXCHANGES = {
    # case: the role, and the rows of the planted script: module, tensor, found, ranks
    "one_rank": ("weights", [("2", "weight", "bf16", [1]), ("2", "bias", "bf16", [1])]),
    "hook": (
        "reduction",
        [
            (module, tensor, "fp16", BOTH)
            for module, tensor in (("2", "bias"), ("2", "weight"), ("0", "bias"), ("0", "weight"))
        ],
    ),
    "reduction": ("reduction", [("2", "weight", "bf16", BOTH), ("2", "bias", "bf16", BOTH)]),
    "gather": ("gather", [("2", "weight", "bf16", BOTH), ("2", "bias", "bf16", BOTH)]),
    "by_hand": ("reduction", []),
}
SLOW = ("hook", "reduction", "gather", "by_hand")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in EXCHANGES])
def test_what_processes_exchange_and_which_rank_differs(case: str, tmp_path: Path) -> None:
    role, rows = EXCHANGES[case]
    Path("precision.toml").write_text(f'[{role}]\n"*" = "fp32"\n', encoding="utf-8")
    words = ["audit", "--out", "out", "--expect", "precision.toml", str(RANKS), case, "planted"]
    ended = in_forks(words, folder=tmp_path)
    assert [one.code for one in ended] == [int(bool(rows))] * 2, ended
    found = contract_in(tmp_path / "out")
    assert sorted((b.module, b.tensor, b.found[0], b.ranks) for b in found.breaches) == sorted(rows)
    assert {b.line for b in found.breaches} == ({line_of(case)} if rows else set())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hook", "one_rank"])
def test_processes_keep_the_contract_that_is_written_of_them_and_others_do_not(case: str, tmp_path: Path) -> None:
    for out, option, how, code in (
        ("written", "--write-expect", "planted", 0),
        ("kept", "--expect", "planted", 0),
        ("not-kept", "--expect", "healthy", 1),
    ):
        ended = in_forks(["audit", "--out", out, option, "precision.toml", str(RANKS), case, how], folder=tmp_path)
        assert [one.code for one in ended] == [code] * 2, ended
    assert EXCHANGES[case][0] in {b.role for b in contract_in(tmp_path / "not-kept").breaches}
