"""Command lines that cannot be carried out: each is refused before anything runs, with the command to type instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo import cli
from mezzo.launch.targets import Target, check_target
from mezzo.version import VERSION
from record_builders import run_record

TRAIN = "import torch\n"
ELSEWHERE = Path.home() / "mezzo-runs" / "first"
FILES = {
    "train.py": TRAIN,
    "lonely/train_all.py": TRAIN,
    "lonely/data.py": TRAIN,
    "src/deep/only_here.py": TRAIN,
    "package/__init__.py": "raise SystemExit('its code must not run')\n",
    "package/mod.py": TRAIN,
    "runnable/__init__.py": "",
    "runnable/__main__.py": TRAIN,
    "notebook.ipynb": "{}",
    "start.sh": "#!/bin/sh\nexec python -u train.py --epochs 3\n",
    "build.sh": "make\n",
    "empty.py": "",
    "comment.py": "# nothing yet\n",
    "picture": "\x00\x01",
    "prose": "This is no Python.\n",
    "runs/old/record.json": "{}",
    "a file": "",
}
POLICIES = "fp32, tf32, fp16, bf16, fp16-master, bf16-master, fp16-pure, bf16-pure, fp8, fp8-block, mxfp8, mxfp4, nvfp4"
RUN_OPTIONS = (
    "--policy, --snapshot, --resume, --guard, --channels-last, --compile, --checkpoint, --seed, --metric, "
    "--fingerprints, -m, --out, --log-to, --json, --verbose"
)
COMMANDS = (
    "doctor, check, run, compare, tune, watch, audit, diagnose, diff, ranges, fallback, predict, resume-check, gate, "
    "report"
)

# What is typed after mezzo, the message, the hint; trailing dots stand for more text.
Wrong = tuple[str, str, str]
WRONG: list[Wrong] = [
    # commands and options
    (
        "comapre train.py",
        f"mezzo has no command 'comapre'; did you mean compare? Allowed: {COMMANDS}",
        "type: mezzo compare train.py",
    ),
    ("train.py --lr 1", f"mezzo has no command 'train.py'; allowed: {COMMANDS}", "type: mezzo run train.py --lr 1"),
    ("xyz", f"mezzo has no command 'xyz'; allowed: {COMMANDS}", "mezzo --help describes each of them"),
    (
        "run --polcy bf16 train.py",
        f"mezzo run has no option --polcy; allowed: {RUN_OPTIONS}",
        "type: mezzo run --policy bf16 train.py",
    ),
    (
        "run --polcy=bf16 train.py",
        f"mezzo run has no option --polcy; allowed: {RUN_OPTIONS}",
        "type: mezzo run --policy=bf16 train.py",
    ),
    (
        "run --policies fp32,bf16 train.py",
        "mezzo run has no option --policies; ...",
        "type: mezzo compare --policies fp32,bf16 train.py",
    ),
    (
        "run --fingerprints --snapshot 5m train.py",
        "--fingerprints with --snapshot or --resume; allowed: one of them",
        "leave one of them out",
    ),
    (  # no command has both
        "check --write-patch --steps 30 train.py",
        "mezzo check has no option --steps; ...",
        "type: mezzo check --write-patch train.py --steps 30",
    ),
    (
        "audit --timeout 3 train.py",
        "mezzo audit has no option --timeout; ...",
        "type: mezzo compare --timeout 3 train.py",
    ),
    (
        "run --epochs 3 train.py",
        "mezzo run has no option --epochs; ...",
        "type: mezzo run train.py --epochs 3",
    ),
    ("run", "Missing argument 'SCRIPT'", "type: mezzo run train.py"),
    ("run -m", "Missing argument 'SCRIPT'", "type: mezzo run -m train"),
    ("run --resume runs/a", "Missing argument 'SCRIPT'", "type: mezzo run --resume runs/a train.py"),
    (
        "run --policy train.py",
        "--policy took 'train.py' as its value, so there is no script",
        "type: mezzo run --policy fp16 train.py",
    ),
    ("report", "Missing argument 'RECORD...'", "type: mezzo report runs/demo/record.json"),
    ("run --seed", "Option '--seed' requires an argument", "type: mezzo run --seed 3 train.py"),
    # values
    (
        "run --seed -5 train.py",
        "--seed -5; allowed: 0 to 4294967295, the range that NumPy accepts",
        "type: mezzo run --seed 5 train.py",
    ),
    (
        "run --seed 4294967296 train.py",
        "--seed 4294967296; allowed: 0 to 4294967295, ...",
        "type: mezzo run --seed 4294967295 train.py",
    ),
    ("run --seed two train.py", "--seed 'two'; allowed: a valid integer", "type: mezzo run --seed 3 train.py"),
    (
        "compare --seeds 0 train.py",
        "--seeds '0'; allowed: greater than or equal to 1",
        "type: mezzo compare --seeds 3 train.py",
    ),
    (
        "compare --seeds=0 train.py",
        "--seeds '0'; allowed: greater than or equal to 1",
        "type: mezzo compare --seeds 3 train.py",
    ),
    ("compare --timeout 0 train.py", "--timeout '0'; allowed: ...", "type: mezzo compare --timeout 10m train.py"),
    (
        "ranges --steps 0 train.py",
        "--steps '0'; allowed: greater than or equal to 1",
        "type: mezzo ranges --steps 20 train.py",
    ),
    (
        "fallback --tolerance 3 train.py",
        "--tolerance '3'; allowed: ...",
        "type: mezzo fallback --tolerance 0.02 train.py",
    ),
    ("run -mq train.py", "mezzo run has no option -q; allowed: ...", "mezzo run --help-all lists its options; ..."),
    (
        "audit --at 5-3 train.py",
        "--at '5-3' is not a list of steps; allowed: numbers from 1, such as 3 or 3,10 or 3-5, and ranges of at most 100,000 steps",
        "type: mezzo audit --at 3 train.py",
    ),
    (
        "run --policy fp61 train.py",
        f"unknown policy 'fp61'; did you mean fp16 or fp8 or fp32? Allowed: {POLICIES}...",
        "type: mezzo run --policy fp16 train.py",
    ),
    ("run --policy fp16:init_scale=big train.py", "...init_scale='big'...", "..."),
    ("run --policy missing.toml train.py", "cannot read the policy file 'missing.toml'...", "..."),
    ("compare --policies fp32,fp17 train.py", "unknown policy 'fp17'...", "..."),
    (
        "compare --policies fp32,,bf16 train.py",
        "--policies 'fp32,,bf16' contains an empty policy name",
        "type: mezzo compare --policies fp32,bf16 train.py",
    ),
    (
        "compare --policies , train.py",
        "--policies ',' contains an empty policy name",
        "type: mezzo compare --policies fp32,bf16,fp16 train.py",
    ),
    (
        "run --metric acc=( train.py",
        "--metric 'acc=(' is not a regular expression: ...",
        "... as in --metric 'acc=([0-9.]+)'",
    ),
    (
        "compare --metric acc train.py",
        "--metric 'acc' has no group",
        "type: mezzo compare --metric 'acc=([0-9.]+)' train.py",
    ),
    # scripts
    ("run trian.py -x", "there is no script 'trian.py'", "type: mezzo run train.py -x"),
    ("run lonely/trainall.py", "there is no script 'lonely/trainall.py'", "type: mezzo run lonely/train_all.py"),
    ("run train", "there is no script 'train'", "type: mezzo run train.py"),
    ("run only_here.py", "there is no script 'only_here.py'", "type: mezzo run src/deep/only_here.py"),
    ("run package.mod", "there is no script 'package.mod'", "type: mezzo run -m package.mod"),
    (
        "run nothing_like_it.py",
        "there is no script 'nothing_like_it.py'",
        "pass the path of a Python file, or -m and the name of a module",
    ),
    ("run runnable", "runnable is a folder; allowed: a Python file", "type: mezzo run runnable/__main__.py"),
    ("run lonely", "lonely is a folder; allowed: a Python file", "type: mezzo run lonely/train_all.py"),
    ("run runs", "runs is a folder; allowed: a Python file", "pass the path of the script that trains"),
    (
        "run notebook.ipynb --lr 1",
        "notebook.ipynb is a notebook; allowed: a Python file",
        "jupyter nbconvert --to script notebook.ipynb, then type: mezzo run notebook.py --lr 1",
    ),
    (
        "run ./start.sh",
        "./start.sh is a shell script; allowed: a Python file",
        "type: mezzo run train.py, with the arguments that the shell script passes to it",
    ),
    (
        "run build.sh",
        "build.sh is a shell script; allowed: a Python file",
        "pass the Python file that it starts, with its arguments",
    ),
    ("run empty.py", "empty.py is empty", "save it first, or pass the script that trains"),
    ("run comment.py", "comment.py is empty", "save it first, or pass the script that trains"),
    ("run picture", "picture is not Python", "pass the path of a Python file"),
    ("run prose", "prose is not Python", "pass the path of a Python file"),
    # launchers
    (
        "run --policy bf16 python -u train.py --lr 1",
        "python is not a script; Mezzo starts Python itself",
        "type: mezzo run --policy bf16 train.py --lr 1",
    ),
    (
        "run /usr/bin/python3.11 -W ignore -m package.mod",
        "/usr/bin/python3.11 is not a script; ...",
        "type: mezzo run -m package.mod",
    ),
    (
        "audit torchrun --nproc-per-node 8 train.py --lr 1",
        "torchrun is not a script; it starts processes, and Mezzo runs inside each of them",
        "type: torchrun --nproc-per-node 2 --no-python mezzo audit train.py --lr 1",
    ),
    (
        "run accelerate launch train.py --lr 1",
        "accelerate is not a script; ...",
        "type: accelerate launch --no_python mezzo run train.py --lr 1",
    ),
    (
        "compare -m paddle.distributed.launch --nproc_per_node 2 train.py",
        "paddle.distributed.launch is not a script; ...",
        "type: python -m paddle.distributed.launch --nproc_per_node 2 mezzo compare train.py",
    ),
    (
        "run -m torch.distributed.run --nproc-per-node 2 train.py",
        "torch.distributed.run is not a script; ...",
        "type: torchrun --nproc-per-node 2 --no-python mezzo run train.py",
    ),
    # modules
    ("run -m train.py", "-m train.py names a file; allowed: a module's name, ...", "type: mezzo run train.py"),
    ("run -m package.mod.py", "-m package.mod.py names a file; ...", "type: mezzo run -m package.mod"),
    ("run -m package/mod", "-m package/mod names a file; ...", "type: mezzo run -m package.mod"),
    (
        "run -m package.mdo -x",
        "there is no module 'package.mdo' that python -m would find from this folder",
        "type: mezzo run -m package.mod -x",
    ),
    (
        "run -m packge.mod",
        "there is no module 'packge.mod' ...",
        "check the name and the folder, or pass the path of a script",
    ),
    ("run -m runable", "there is no module 'runable' ...", "type: mezzo run -m runnable"),
    (
        "run -m package",
        "'package' is a package without a __main__, so it cannot be run",
        "name one of its modules: -m package.mod",
    ),
    # folders and records
    (
        "run --out train.py train.py",
        "--out 'train.py' cannot be used as a folder: it is a file",
        f"type: mezzo run --out {ELSEWHERE} train.py",
    ),
    (
        "run --out train.py/x train.py",
        "--out 'train.py/x' cannot be used as a folder: ...",
        f"type: mezzo run --out {ELSEWHERE} train.py",
    ),
    (
        "run --out /proc/x train.py",
        "--out '/proc/x' cannot be used as a folder: it is not writable (...",
        f"type: mezzo run --out {ELSEWHERE} train.py",
    ),
    (
        "run --log-to tensorbord train.py",
        "--log-to 'tensorbord' names no tracker; did you mean tensorboard? Allowed: tensorboard, wandb, mlflow",
        "type: mezzo run --log-to tensorboard train.py",
    ),
    (
        "run --log-to tensorboard:train.py train.py",
        "--log-to tensorboard: 'train.py' cannot be used as a folder: ...",
        f"type: mezzo run --log-to tensorboard:{ELSEWHERE} train.py",
    ),
    (
        "doctor --out train.py",
        "--out 'train.py' cannot be used as a folder: ...",
        f"type: mezzo doctor --out {ELSEWHERE}",
    ),
    (
        "report --out train.py runs/old/record.json",
        "--out 'train.py' cannot be used as a folder: ...",
        f"type: mezzo report --out {ELSEWHERE} runs/old/record.json",
    ),
    (
        "report --json runs/old/record.json b.json",
        "--json accepts one record; 2 were given",
        "type: mezzo report --json runs/old/record.json, and the same for each of the others",
    ),
    (
        "report runs/old/recrd.json",
        "there is no record 'runs/old/recrd.json'",
        "type: mezzo report runs/old/record.json",
    ),
    ("report nothing.json", "there is no record 'nothing.json'", "type: mezzo report runs/"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fits(said: str, pattern: str) -> bool:
    start, *rest = pattern.split("...")
    place = len(start) if said.startswith(start) else -1
    for part in rest:
        place = said.find(part, place) + len(part) if place >= 0 and part in said[place:] else -1
    return place == len(said) or (place >= 0 and pattern.endswith("..."))


@pytest.mark.parametrize(("typed", "said", "hint"), WRONG, ids=[typed for typed, _, _ in WRONG])
def test_what_cannot_work_is_refused_with_the_command_to_type(
    folder: Path, capsys: pytest.CaptureFixture[str], typed: str, said: str, hint: str
) -> None:
    before = sorted(folder.rglob("*"))
    assert cli.main(typed.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.removesuffix("\n").split("\n  hint: ")
    assert fits(first, f"mezzo: {said}"), first
    assert fits(second, hint), second
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


@pytest.mark.parametrize(
    "typed", ["run runnable/__main__.py", "run -m runnable", "run -m package.mod", "run -- train.py"]
)
def test_what_python_would_run_is_not_refused(folder: Path, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.launch.runner.run_child", lambda request: run_record("fp16"))
    assert cli.main(typed.split()) == 0


def test_an_error_in_a_scripts_syntax_is_shown_as_python_shows_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("import torch\ndef train(:\n    pass\n")
    python = subprocess.run([sys.executable, "broken.py"], capture_output=True, text=True, check=False)
    shown = python.stderr.replace(str(folder) + os.sep, "")
    for command in ("run", "compare", "audit", "diagnose", "ranges", "fallback"):
        assert cli.main([command, "broken.py"]) == python.returncode == 1
        printed = capfd.readouterr()
        assert (printed.out, printed.err) == ("", shown)
    assert not (folder / "runs" / "broken").exists()
    assert [path.name for path in (folder / "runs").iterdir()] == ["old"]


def test_a_package_is_found_without_running_its_code(folder: Path) -> None:
    check_target(Target("package.mod", module=True))
    assert "package" not in sys.modules


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mezzo {VERSION}\n"


# --- what comes after the script ---------------------------------------------------------------------------------------------

AFTER = [
    ("run plain.py --policy bf16", "import torch", "--policy bf16", "mezzo run --policy bf16 plain.py"),
    (
        "run plain.py --lr 1 --policy=bf16 -x",
        "import torch",
        "--policy=bf16",
        "mezzo run --policy=bf16 plain.py --lr 1 -x",
    ),
    ("run plain.py --json", "import torch", "--json", "mezzo run --json plain.py"),
    ("run -m plain --json", "import torch", "--json", "mezzo run --json -m plain"),
    ("audit --at 3 plain.py --at 4", "import torch", "--at 4", "mezzo audit --at 3 --at 4 plain.py"),
    ("run plain.py --policy", "import torch", "--policy", "mezzo run --policy plain.py"),
    (  # an option of another command
        "run plain.py --policies bf16",
        "import torch",
        "--policies bf16",
        "mezzo compare --policies bf16 plain.py",
    ),
    # It may be the script's own.
    ("run plain.py --policy bf16", "parser.add_argument('--policy')", "", ""),
    ("run plain.py --policy bf16", "class Arguments:\n    policy: str", "", ""),
    ("run plain.py --policy bf16", "import helper", "", ""),
    ("run plain.py --seed 3", "parser = HfArgumentParser(TrainingArguments)", "", ""),
    ("run plain.py --lr 1", "import torch", "", ""),
    ("run plain.py --policies bf16", "parser.add_argument('--policies')", "", ""),
    ("run -- plain.py --policy bf16", "import torch", "", ""),
    ("run plain.py -m", "import torch", "", ""),
]


@pytest.mark.parametrize(("typed", "source", "words", "instead"), AFTER)
def test_an_option_of_ours_after_the_script_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    source: str,
    words: str,
    instead: str,
) -> None:
    (folder / "plain.py").write_text(source)
    (folder / "helper.py").write_text("flags.DEFINE_string('policy', '', '')")
    asked = []

    def child(request: object) -> object:
        asked.append(request)
        return run_record("fp16")

    monkeypatch.setattr("mezzo.launch.runner.run_child", child)
    monkeypatch.setattr("mezzo.launch.runner.observe_child", child)
    code = cli.main(typed.split())
    name = "plain" if " -m plain" in typed else "plain.py"
    behind = typed.split(f" {name}", 1)[1]
    if words:
        assert (code, asked) == (2, [])
        said, hint = capsys.readouterr().err.split("\n  hint: ")
        assert (
            said
            == f"mezzo: {words} comes after {name}, which does not mention it; allowed: options of Mezzo before the script"
        )
        asis = (
            "mezzo "
            + typed.replace("-m ", "").split(f" {name}")[0]
            + f"{' -m' if name == 'plain' else ''} -- {name}{behind}"
        )
        assert hint == f"type: {instead}, or, if it is the script's own: {asis}\n"
        return
    assert capsys.readouterr().err == ""
    assert list(asked[0].arguments) == behind.split()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "[default: a new folder under runs/]"),
        ("run", "with --json, the script's output goes to standard error. Under torchrun"),
        ("compare", "[default: 20 times the longest run so far, at least 10m]"),
        (
            "fallback",
            "[default: what rounding explains, and at least 0.02 for fp16, 0.16 for bf16, 0.5 for fp8 and blocks]",
        ),
    ],
)
def test_help_shows_defaults_in_words_and_wraps_whole_paragraphs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    cli.main([command, "--help-all"])
    shown = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().out).split())
    assert words in shown
