"""Shell completion, requested as a shell does: through the environment, in the forms of bash and zsh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mezzo import cli


def offered(typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what bash is offered for the last word of ``typed``."""
    words = typed.split(" ")
    monkeypatch.setenv("_MEZZO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert cli.main([]) == 0
    return capsys.readouterr().out.split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "other.py", "notes.txt", "kept.toml", "runs/a/record.json", "pkg/main.py", ".hidden.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


FP16 = ["fp16", "fp16-master", "fp16-pure"]
CASES = [
    ("mezzo comp", ["compare"]),
    ("mezzo run --poli", ["--policy"]),
    ("mezzo compare --fail", ["--fail-on"]),
    *((f"mezzo {name} --policy fp16", FP16) for name in ("run", "audit", "diagnose", "ranges", "fallback")),
    ("mezzo run --policy O", ["O0", "O1", "O2", "O3"]),
    ("mezzo run --policy as", ["as-is"]),
    ("mezzo run --policy k", ["kept.toml"]),
    (
        "mezzo compare --policies fp32,fp",
        ["fp32,fp16", "fp32,fp16-master", "fp32,fp16-pure", "fp32,fp8", "fp32,fp8-block"],
    ),
    ("mezzo compare --fail-on di", ["different", "diverged"]),
    (
        "mezzo compare --fail-on diverged,",
        [f"diverged,{name}" for name in ("different", "stopped_learning", "undecided", "failed", "not_equivalent")],
    ),
    ("mezzo run ", ["other.py", "pkg/", "runs/", "train.py"]),
    ("mezzo audit --at 3 pkg/", ["pkg/main.py"]),
    ("mezzo run .h", [".hidden.py"]),
    ("mezzo run nowhere/", []),
    ("mezzo run train.py --pol", []),  # the script's own
    ("mezzo run train.py no", []),  # the shell completes files by itself
    ("mezzo report runs/a/", ["runs/a/record.json"]),
]


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_what_is_offered(
    typed: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(typed, monkeypatch, capsys) == expected


def test_zsh_is_answered_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_MEZZO_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "mezzo run --policy bf16-")
    assert cli.main([]) == 0
    answer = capsys.readouterr().out
    assert all(name in answer for name in ("bf16-master", "bf16-pure", "bf16-mixed", "bf16-true"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_script_asks_mezzo(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MEZZO_COMPLETE", f"source_{shell}")
    assert cli.main([]) == 0
    assert "_MEZZO_COMPLETE" in capsys.readouterr().out


def test_completion_imports_neither_torch_nor_the_report() -> None:
    code = (
        "import os, sys; os.environ.update(_MEZZO_COMPLETE='complete_bash', COMP_WORDS='mezzo run --policy ', COMP_CWORD='3')\n"
        "from mezzo import cli\ncli.main([])\n"
        "print([name for name in ('torch', 'plotly', 'jinja2', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
