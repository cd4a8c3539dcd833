"""The child process's work, done in this process: what a script sees, how it ends, and the record that it leaves."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import mezzo
from helpers_launch import request_for
from helpers_values import existing, record_at
from mezzo.launch import child
from mezzo.observe.settings import AuditSettings, DiagnoseSettings
from mezzo.records import RunRecord, read_record
from paths import SCRIPTS

OURS = Path(mezzo.__file__).parent
"""A folder called mezzo may also be above the script, or above torch."""
TRAINS = """
    import sys, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps=3):
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).pow(2).mean()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss={loss.item():.4f}")
"""


@dataclass(frozen=True)
class Ended:
    code: int
    record: RunRecord
    printed: str
    errors: str


@pytest.fixture(autouse=True)
def _same_interpreter_afterwards() -> Iterator[None]:
    before = list(sys.argv), list(sys.path), sys.stdout, sys.stderr, os.getcwd()
    yield
    sys.argv, sys.path[:], sys.stdout, sys.stderr = before[:4]
    os.chdir(before[4])


def run_text(tmp_path: Path, text: str, *arguments: str, policy: str = "fp16", **asked: Any) -> Ended:
    """Write a script, run it, and return how it ended."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TRAINS) + textwrap.dedent(text))
    return run_script(tmp_path, str(script), *arguments, policy=policy, **asked)


def run_script(
    tmp_path: Path, target: str, *arguments: str, policy: str = "fp16", kind: str = "script", **asked: Any
) -> Ended:
    request = request_for(tmp_path, target, *arguments, policy=policy, kind=kind, **asked)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = child.main([request.model_dump_json()])
    record = record_at(tmp_path / "record.json", RunRecord)
    assert record.exit_code == code
    return Ended(code, record, printed.getvalue(), errors.getvalue())


def test_a_script_that_ends_by_itself(tmp_path: Path) -> None:
    ended = run_text(tmp_path, "train()")
    assert (ended.code, ended.record.error, ended.errors) == (0, None, "")
    assert len(ended.record.steps) == 3
    assert ended.record.policy == "fp16"
    assert ended.record.script_sha256 == hashlib.sha256((tmp_path / "script.py").read_bytes()).hexdigest()
    assert ended.record.environment.device == "cpu"
    assert {reason.what for reason in ended.record.explanation} >= {"compute", "loss scale"}
    assert ended.record.duration_s > 0
    assert [f"{loss:.4f}" for loss in ended.record.steps.loss] == re.findall("loss=([0-9.]+)", ended.printed)


def test_a_script_sees_what_it_would_see_under_python(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path,
        """
        import json, __main__
        train(1)
        place = [sys.argv, sys.path[0], __name__, __file__, __main__.__file__, __main__.model is model]
        print(json.dumps(place))
        """,
        "--policy",
        "x",
        "-m",
    )
    script = str(tmp_path / "script.py")
    seen = json.loads(ended.printed.splitlines()[-1])
    assert seen == [[script, "--policy", "x", "-m"], str(tmp_path), "__main__", script, script, True]


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("sys.exit()", 0, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit(-1)", 255, None),
        ("sys.exit('told so')", 1, None),
        ("raise KeyError('k')", 1, "KeyError: 'k'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_exit_codes_pass_through_and_every_finished_update_is_kept(
    tmp_path: Path, ending: str, code: int, error: str | None
) -> None:
    ended = run_text(tmp_path, f"train()\n{ending}")
    assert (ended.code, ended.record.error) == (code, error)
    assert len(ended.record.steps) == 3
    assert ("told so" in ended.errors) == ("told so" in ending)


def test_a_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path,
        """
        class Model(torch.nn.Module):
            def forward(self, x):
                return fails(x)
        def fails(x):
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError("no") from error
        Model()(torch.ones(1))
        """,
    )
    lines = ended.errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no"
    files = re.findall(r'File "([^"]+)", line \d+, in (\S+)', ended.errors)
    script = str(tmp_path / "script.py")
    assert files[0] == (script, "fails")  # of the cause
    assert files[1] == (script, "<module>")
    assert files[-1] == (script, "fails")
    assert not [f for f, _ in files if OURS in Path(f).parents or "runpy" in Path(f).name]
    assert ended.record.error == "ValueError: no"
    assert len(ended.record.steps) == 0


def test_errors_in_a_backward_pass_show_no_frames_of_ours(tmp_path: Path) -> None:
    ended = run_text(tmp_path, "torch.ones(2, requires_grad=True).backward()")
    assert "grad can be implicitly created only for scalar outputs" in ended.errors
    files = re.findall(r'File "([^"]+)"', ended.errors)
    assert files[0] == str(tmp_path / "script.py")
    assert not [f for f in files if OURS in Path(f).parents]


def test_a_syntax_error_looks_as_under_python(tmp_path: Path) -> None:
    ended = run_text(tmp_path, "train(\n")
    assert ended.code == 1
    assert ended.errors.splitlines()[0].startswith(f'  File "{tmp_path / "script.py"}", line')
    assert ended.errors.splitlines()[-1] == "SyntaxError: '(' was never closed"


def test_the_scripts_own_excepthook_is_called(tmp_path: Path) -> None:
    ended = run_text(tmp_path, "sys.excepthook = lambda *e: print('hooked', e[0].__name__)\nraise KeyError")
    assert ended.printed.splitlines()[-1] == "hooked KeyError"


def test_a_script_that_leaves_out_its_only_updates(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path, "optimizer = torch.optim.SGD(model.parameters())\nmodel(torch.ones(1, 3)).sum().backward()"
    )
    assert ended.code == 7
    assert ended.record.error is not None
    assert ended.record.error.endswith("it called backward(), but no optimizer made a step")
    assert "--policy as-is" in ended.record.hint


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    ended = run_text(tmp_path, "print(model(torch.ones(1, 3)).shape)")
    assert ended.code == 7
    assert ended.record.error is not None
    assert "never called backward()" in ended.record.error
    assert "mezzo:" in ended.errors
    assert "hint:" not in ended.errors  # the command's report has it
    assert ended.record.hint.startswith("pass the script that trains")


def test_a_framework_that_only_a_package_imports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", ModuleType("paddle"))
    ended = run_text(tmp_path, "print(model(torch.ones(1, 3)).shape)")
    assert ended.code == 7
    assert ended.record.error is not None
    assert "A package imported paddle, but no file of the script does" in ended.record.error
    assert ended.record.hint.startswith("write import paddle in ")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("get_ipython().system('ls')", "the script is an exported notebook"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "the script asks for a GPU"),
        ("raise ImportError('cannot import name amp from apex')", "the installed apex lacks"),
        ("raise ValueError('own')", ""),
    ],
)
def test_the_record_says_what_to_do_about_an_error_of_the_script(tmp_path: Path, text: str, hint: str) -> None:
    ended = run_text(tmp_path, text)
    assert (ended.code, ended.record.exit_code) == (1, 1)
    assert ended.record.hint.startswith(hint)
    assert bool(ended.record.hint) == bool(hint)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_loss_that_is_infinite_at_once(tmp_path: Path, policy: str) -> None:
    ended = run_text(tmp_path, "(model(torch.ones(1, 3)).sum() * float('inf')).abs().backward()", policy=policy)
    assert ended.code == 6
    assert ended.record.error == "the loss is inf before the first update"


def test_a_scale_at_its_floor(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path, "model.weight.register_hook(lambda g: g / 0)\ntrain(50)", policy="fp16:init_scale=16:min_scale=4"
    )
    assert ended.code == 5
    assert ended.record.steps.loss_scale == [8.0, 4.0, 4.0]
    assert ended.record.steps.num_skipped == 3


def test_the_last_update_at_the_floor_is_an_error_too(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path, "model.weight.register_hook(lambda g: g / 0)\ntrain(1)", policy="fp16:init_scale=4:min_scale=4"
    )
    assert ended.code == 5
    assert ended.record.error is not None
    assert "floor of 4" in ended.record.error


def test_a_pattern_that_matches_no_module(tmp_path: Path) -> None:
    ended = run_script(tmp_path, str(SCRIPTS / "plain.py"), policy="fp16:fp32_modules=hed")
    assert ended.code == 2
    assert "no module is named 'hed'; allowed: 0, 1, 2" in ended.errors


def test_a_script_may_change_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS) + "import os\nos.chdir('elsewhere')\ntrain()\n")
    request = request_for(Path("out"), "script.py", policy="fp16")
    with contextlib.redirect_stdout(io.StringIO()):
        assert child.main([request.model_dump_json()]) == 0
    record = record_at(tmp_path / "out" / "record.json", RunRecord)
    assert record.script_sha256 == hashlib.sha256((tmp_path / "script.py").read_bytes()).hexdigest()


def test_a_module_runs_from_the_folder_it_is_called_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text(textwrap.dedent(TRAINS) + "from trainers import second\ntrain(second.steps)\n")
    (package / "second.py").write_text("steps = 4\n")
    monkeypatch.chdir(tmp_path)
    ended = run_script(tmp_path, "trainers.first", "--lr", "1", kind="module")
    assert (ended.code, len(ended.record.steps)) == (0, 4)
    assert ended.record.script_sha256 == hashlib.sha256((package / "first.py").read_bytes()).hexdigest()


@pytest.mark.parametrize(("compiler", "late"), [("os", ["TORCHDYNAMO_VERBOSE", "TORCH_COMPILE_DISABLE"]), ("none", [])])
def test_settings_that_came_too_late_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, late: list[str]
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "x")
    monkeypatch.setattr(child, "_COMPILER", compiler)
    sets = "".join(
        f"os.environ[{name!r}] = '2'\n" for name in (*late, "TORCHINDUCTOR_CACHE_DIR", "TORCHDYNAMO_VERBOSE", "PATH")
    )
    (tmp_path / "script.py").write_text(f"{textwrap.dedent(TRAINS)}train()\nimport os\n{sets}")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with contextlib.redirect_stdout(io.StringIO()):
        assert child.main([request_for(tmp_path, str(tmp_path / "script.py")).model_dump_json()]) == 0
    read = record_at(tmp_path / "record.json", RunRecord)
    assert [(reason.what, reason.value) for reason in read.effective.left_alone] == [(name, "ignored") for name in late]


def test_a_training_thread_that_outlives_the_script_is_waited_for(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path,
        """
        import threading, time
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(int).result()  # an idle worker is not waited for
        threading.Thread(target=lambda: (time.sleep(0.3), train(5))).start()
        """,
    )
    assert (ended.code, len(ended.record.steps)) == (0, 5)
    assert ended.record.effective.flops_by_format == {"fp16": 2 * 2 * 4 * 3}


# --- signals -----------------------------------------------------------------------------------------------------------------

BY_SIGNAL = [
    ("SIGTERM", 143, "stopped by SIGTERM"),
    ("SIGHUP", 129, "stopped by SIGHUP"),
    ("SIGRTMAX - 1", 143, "stopped by force: it had not reacted to the first signal"),
]


@pytest.mark.parametrize(("name", "code", "sentence"), BY_SIGNAL)
def test_a_signal_ends_a_script_and_keeps_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, sentence: str
) -> None:
    left: list[tuple[int, bool]] = []
    monkeypatch.setattr(child, "_exit_without_shutdown", lambda code, *, run_atexit: left.append((code, run_atexit)))
    ended = run_text(
        tmp_path,
        f"""
        import os, signal, time
        try:
            train()
            os.kill(os.getpid(), signal.{name})
            time.sleep(60)
        except Exception:
            print("swallowed")
        finally:
            print("unwound")
        """,
    )
    assert (ended.code, ended.record.error, left) == (code, sentence, [(code, False)])
    assert len(ended.record.steps) == 3
    assert ended.printed.splitlines()[3:] == ["unwound"]
    assert ended.errors == ""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_scripts_own_handler_is_its_own(tmp_path: Path) -> None:
    text = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        train()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    ended = run_text(tmp_path, text)
    assert (ended.code, ended.record.error, len(ended.record.steps)) == (7, None, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
def test_a_process_that_the_script_forks_dies_as_under_python(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path,
        """
        import os, signal, time, warnings
        warnings.simplefilter("ignore")  # of a fork in a process with threads, as this one's tests may have
        train()
        number = os.fork()
        if number == 0:
            while True: time.sleep(0.01)
        os.kill(number, signal.SIGTERM)
        print("wait status", os.waitpid(number, 0)[1])
        """,
    )
    assert ended.printed.splitlines()[-1] == f"wait status {int(signal.SIGTERM)}"


# --- what a device cannot do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", [None, AuditSettings(), DiagnoseSettings()])
def test_a_format_that_the_device_lacks_ends_the_run_with_a_record(tmp_path: Path, observe: Any) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS) + "train()\n")
    request = request_for(tmp_path, str(tmp_path / "script.py"), policy="fp8:arithmetic=native", observe=observe)
    errors = io.StringIO()
    # Daemon threads of earlier tests would have a diagnosed script's process end at once, and pytest with it.
    at_once = mock.patch.object(child, "_exit_without_shutdown")
    with at_once, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        assert child.main([request.packed()]) == 3
    record = read_record(tmp_path / "record.json")
    run = record if isinstance(record, RunRecord) else record.run  # type: ignore[union-attr]
    assert run.error is not None
    assert run.error.startswith("policy fp8:arithmetic=native asks for native fp8 arithmetic on")
    assert [(why.what, why.value) for why in run.explanation] == [("arithmetic", "impossible here")]
    assert not run.effective.emulated
    assert errors.getvalue().startswith(f"mezzo: {run.error}\n")


# --- metrics -----------------------------------------------------------------------------------------------------------------


def test_a_metric_is_read_off_both_streams(tmp_path: Path) -> None:
    ended = run_text(
        tmp_path,
        """
        train(2)
        print("epoch 1 acc=0.5", end="")
        print(" acc=0.75", file=sys.stderr)
        sys.stdout.writelines(["\\nacc=", "0.8\\nacc=.\\n"])
        print("acc=0.9", end="\\r")
        print("acc=1", end="")
        """,
        metric="acc=([0-9.]+)",
    )
    metric = existing(ended.record.metric)
    assert metric.name == "acc"
    assert sorted(metric.values) == [0.5, 0.75, 0.8, 0.9, 1.0]
    assert metric.steps == [2] * 5
    assert ended.printed.endswith("epoch 1 acc=0.5\nacc=0.8\nacc=.\nacc=0.9\racc=1")
