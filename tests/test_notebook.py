"""Records in IPython, and cells that run as scripts; IPython itself shows and runs them."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mezzo
import record_builders as build
from mezzo import notebook
from mezzo.records import CompareRecord, RunRecord, write_record
from mezzo.report.html import render_html

pytest.importorskip("IPython")

SCRIPT = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """IPython in this process, as a notebook's kernel has it: it shows HTML as well as text."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    made = InteractiveShell.instance(config=settings)
    assert made.display_formatter is not None
    made.display_formatter.active_types = made.display_formatter.format_types
    yield made
    InteractiveShell.clear_instance()


def shown(shell: Any, value: object) -> dict[str, str]:
    data, _ = shell.display_formatter.format(value)
    return data  # type: ignore[no-any-return]


def test_a_record_is_its_page_in_a_frame_of_its_own(shell: Any) -> None:
    record = build.doctor_record()
    notebook.show_records_in_running_shell()
    data = shown(shell, record)
    assert set(data) == {"text/plain", "text/html"}
    frame = re.fullmatch(
        r'<iframe title="([^"]*)" sandbox="([^"]*)" style="[^"]*" srcdoc="([^"]*)"></iframe>', data["text/html"]
    )
    assert frame is not None
    assert html.unescape(frame[1]) == repr(record)
    assert "allow-same-origin" not in frame[2].split()  # it would let the page's scripts reach the notebook
    assert html.unescape(frame[3]) == render_html(record)
    assert data["text/plain"].startswith("NVIDIA H100 80GB HBM3 computes natively in fp16\n")
    assert "Environment" in data["text/plain"]


def test_without_mezzo_records_in_a_list_are_lines(shell: Any) -> None:
    notebook.show_records_in_running_shell()
    records = [build.run_record("fp16", num_steps=3), build.doctor_record()]
    assert shown(shell, records)["text/plain"].replace("\n", "") == f"[{records[0]!r}, {records[1]!r}]"


def test_hostile_names_stay_inside_the_frame(shell: Any) -> None:
    notebook.show_records_in_running_shell()
    record = build.run_record("fp16", num_steps=3, script='"></iframe><script>alert(1)</script>.py')
    text = shown(shell, record)["text/html"]
    assert text.count("<") == 2  # the frame begins and ends
    assert text.count('"') == 8


def test_importing_mezzo_in_a_notebook_is_enough_and_imports_no_report(tmp_path: Path) -> None:
    write_record(build.doctor_record(), tmp_path / "record.json")
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.display_formatter.active_types = shell.display_formatter.format_types
shell.run_cell("import mezzo", store_history=False)
print([name for name in ("torch", "pydantic", "mezzo.records", "mezzo.report", "rich.console") if name in sys.modules])
shell.run_cell("record = mezzo.read_record('record.json')", store_history=False)
print(sorted(shell.display_formatter.format(shell.user_ns["record"])[0]), "torch" in sys.modules)
"""
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines() == ["[]", "['text/html', 'text/plain'] False"], done.stderr


def test_import_without_ipython_loads_nothing() -> None:
    code = "import sys, mezzo; print('mezzo.notebook' in sys.modules, 'subprocess' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": str(Path(mezzo.__file__).parents[1])}).stdout == "False False\n"  # fmt: skip


def test_a_cell_runs_as_a_script(shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    shell.run_cell("%load_ext mezzo")
    source = f"import sys, beside\nprint(beside.WORD, sys.argv[1:])\n{SCRIPT}"
    result = shell.run_cell(f"%%mezzo run --policy bf16 --out first -- --epochs 2\n{source}")
    assert result.success
    record = result.result
    assert isinstance(record, RunRecord)
    assert (record.policy, len(record.steps), record.exit_code) == ("bf16", 4, 0)
    assert "found ['--epochs', '2']\n" in capsys.readouterr().out
    (cell,) = (tmp_path / "runs" / "cells").iterdir()
    assert cell.read_text() == f"# %%mezzo\n{source}"
    assert record.command[:3] == ["mezzo", "run", "--json"]
    assert record.command[-3:] == [f"runs/cells/{cell.name}", "--epochs", "2"]
    assert (tmp_path / "first" / "report.html").is_file()


@pytest.mark.slow
def test_tracebacks_show_the_lines_of_the_cell(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%load_ext mezzo")
    result = shell.run_cell(f"%%mezzo run --out first\n{SCRIPT}raise ValueError('here')\n")
    assert isinstance(result.result, RunRecord)
    assert result.result.error == "ValueError: here"
    out = capsys.readouterr().out
    assert re.search(
        r'File ".*runs/cells/cell-[0-9a-f]{8}\.py", line 10, in <module>\n +raise ValueError\(.here.\)', out
    )
    assert "mezzo: exit code 1\n" in out


@pytest.mark.slow
def test_a_comparison_of_a_cell(shell: Any) -> None:
    shell.run_cell("%load_ext mezzo")
    result = shell.run_cell(f"%%mezzo compare --policies fp32,bf16 --seeds 1 --gpus none\n{SCRIPT}")
    assert isinstance(result.result, CompareRecord)
    assert [row.policy for row in result.result.rows] == ["fp32", "bf16"]
    assert set(shown(shell, result.result)) == {"text/plain", "text/html"}


def test_a_line_runs_a_file_or_prints_help(shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_record(build.doctor_record(), tmp_path / "a" / "record.json")
    shell.run_cell("%load_ext mezzo")
    assert shell.run_cell("%mezzo report a/record.json").result == build.doctor_record()
    assert shell.run_cell("%mezzo report --help").result is None
    assert "Usage: mezzo report" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_of_records_and_several_records_have_no_record_of_their_own(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_record(build.doctor_record(), tmp_path / "runs" / name / "record.json")
    shell.run_cell("%load_ext mezzo")
    assert shell.run_cell("%mezzo report runs/a").result == build.doctor_record()
    for words in ("runs", "runs/a runs/b"):
        done = shell.run_cell(f"%mezzo report {words}")
        assert done.success, words
        assert done.result is None, words
    assert (tmp_path / "runs" / "index.html").is_file()
    assert "report: runs/b/report.html" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["%matplotlib inline", "!pip list", "files = !ls", "torch.nn?"])
def test_a_cell_with_lines_for_ipython_says_which(shell: Any, capfd: pytest.CaptureFixture[str], line: str) -> None:
    shell.run_cell("%load_ext mezzo")
    result = shell.run_cell(f"%%mezzo run\nimport torch\n{line}\n{SCRIPT}")
    assert str(result.error_in_exec).startswith(f"line 3, {line!r}, is for IPython, and %%mezzo runs the cell as")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_cell_that_needs_a_variable_of_the_notebook_says_so(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%load_ext mezzo")
    shell.run_cell("width = 3")
    note = "mezzo: width is a variable of the notebook, and the cell sees none of them: define it in the cell\n"
    shell.run_cell("%%mezzo run\nimport torch\nprint(width)")
    assert note in capsys.readouterr().out
    shell.run_cell("%%mezzo run\nimport torch\nprint(widths)")
    assert "is a variable of the notebook" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("magic", "said"),
    [
        ("%%mezzo", "name a command: %%mezzo compare --policies fp32,bf16, or %mezzo --help"),
        ("%%mezzo run --policy fp61", "unknown policy 'fp61'; did you mean fp16"),
        ("%%mezzo run", "was never closed"),
    ],
)
def test_what_cannot_run_ends_the_cell(shell: Any, capfd: pytest.CaptureFixture[str], magic: str, said: str) -> None:
    shell.run_cell("%load_ext mezzo")
    source = "print(1" if magic == "%%mezzo run" else SCRIPT
    result = shell.run_cell(f"{magic}\n{source}\n")
    assert type(result.error_in_exec).__name__ == "UsageError"
    out, err = capfd.readouterr()
    assert said in out + err
    assert "Traceback" not in err


@pytest.mark.slow  # in make test, an interrupt of the command itself: tests/cli/test_cli.py
def test_an_interrupt_ends_the_run_and_keeps_its_record(shell: Any, tmp_path: Path) -> None:
    shell.run_cell("%load_ext mezzo")
    source = SCRIPT.replace("range(4)", "range(10**9)").replace(
        "    optimizer.step()", "    optimizer.step(); open('going', 'w')"
    )

    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not (tmp_path / "going").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    result = shell.run_cell(f"%%mezzo run --policy fp32\n{source}")
    assert isinstance(result.result, RunRecord)
    assert len(result.result.steps) > 0
    assert result.result.exit_code == 130
