"""Recorded command lines, changed to other commands on the same script."""

from __future__ import annotations

import shlex

import pytest
from typer.main import get_command

from mezzo.cli import app
from mezzo.report.commands import CARRIED, FLAGS, Script, function_call

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
ON_SCRIPTS = [name for name, command in COMMANDS.items() if any(p.name == "target" for p in command.params)]

CASES = [
    # typed, its script, the new command and its options, the text
    (
        "compare train.py --epochs 3",
        "train.py",
        ("diagnose", {"policy": "fp16"}),
        "mezzo diagnose --policy fp16 train.py --epochs 3",
    ),
    (
        "compare --policies fp32,O1 --seeds 5 --margin 0.1 --metric 'acc ([0-9]+)' --out r train.py",
        "train.py",
        ("run", {"policy": "O1"}),
        "mezzo run --policy O1 --metric 'acc ([0-9]+)' train.py",
    ),
    (
        "compare --seeds=2 --margin=0.1 --json --out r t.py",
        "t.py",
        ("compare", {"seeds": "9"}),
        "mezzo compare --seeds 9 --margin 0.1 t.py",
    ),
    ("diagnose --steps 5 -m pkg.train -m x", "pkg.train", ("ranges", {}), "mezzo ranges -m pkg.train -m x"),
    (
        "run -- -t.py -- --policy x",
        "-t.py",
        ("audit", {"policy": "fp16"}),
        "mezzo audit --policy fp16 -- -t.py -- --policy x",
    ),
    (
        "compare t.py --out 'o/{run}'",
        "t.py",
        ("run", {"policy": "fp16:init_scale=2"}),
        "mezzo run --policy fp16:init_scale=2 t.py --out o/run-fp16-init_scale-2",
    ),
    ("compare t.py --out 'o/{run}'", "t.py", ("compare", {}), "mezzo compare t.py --out 'o/{run}'"),
    (
        "run 'my script.py' \"it's\" '$HOME' '*' ''",
        "my script.py",
        ("audit", {}),
        "mezzo audit 'my script.py' 'it'\"'\"'s' '$HOME' '*' ''",
    ),
    (
        "run --log-to wandb --log-to tensorboard:tb t.py",
        "t.py",
        ("audit", {"policy": "fp16"}),
        "mezzo audit --policy fp16 --log-to wandb --log-to tensorboard:tb t.py",
    ),
    ("run --metric=-x t.py", "t.py", ("compare", {}), "mezzo compare --metric=-x t.py"),
]


@pytest.mark.parametrize(("typed", "name", "asked", "text"), CASES)
def test_the_new_command(typed: str, name: str, asked: tuple[str, dict[str, str]], text: str) -> None:
    script = Script.typed(["mezzo", *shlex.split(typed)], name)
    assert script is not None
    assert script.under(asked[0], **asked[1]) == text


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["mezzo"],
        ["mezzo", "doctor"],
        ["python", "x.py"],
        ["mezzo", "run", "other.py"],
        ["mezzo", "run", "--metric"],
    ],
)
def test_what_is_no_command_on_the_script(words: list[str]) -> None:
    assert Script.typed(words, "train.py") is None


def test_the_scripts_own_command() -> None:
    typed = Script.typed(["mezzo", "compare", "--seeds", "2", "-m", "pkg.train", "--to", "{run}"], "pkg.train")
    assert typed is not None
    assert typed.alone() == "python -m pkg.train --to alone"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "2"}, "KERAS_BACKEND=torch mezzo audit t.py"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nproc-per-node 2 --no-python mezzo audit t.py",
        ),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "mezzo audit t.py"),
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            "mezzo audit t.py",
        ),  # of several machines: their launcher is not known
    ],
)
def test_where_it_ran(variables: dict[str, str], text: str) -> None:
    typed = Script.typed(["mezzo", "run", "t.py"], "t.py")
    assert typed is not None
    there = typed.in_framework("torch 2.13.0", variables)
    assert there.under("audit") == text
    assert ("torchrun" in there.under("fallback")) is ("torchrun" in text)
    assert "torchrun" not in there.under("check")


def test_other_frameworks_have_three_commands() -> None:
    typed = Script.typed(["mezzo", "run", "t.py"], "t.py")
    assert typed is not None
    keras = typed.in_framework("keras 3.15.1 on tensorflow 2.21.0", {})
    assert [name for name in ON_SCRIPTS if keras.runs(name)] == ["check", "run", "compare"]
    for inspected in ("torch 2.13.0", "keras 3.15.1 on torch 2.13.0", "paddle 3.3.0"):
        assert all(typed.in_framework(inspected, {}).runs(name) for name in ON_SCRIPTS)


def test_a_function_has_its_call() -> None:
    assert function_call("diagnose", "main.<locals>.train", "fp16") == 'mezzo.diagnose(train, policy="fp16")'
    assert function_call("audit", "<lambda>") == "mezzo.audit(train)"


def test_the_flags_are_those_of_the_commands() -> None:
    flags = {o for name in ON_SCRIPTS for p in COMMANDS[name].params if getattr(p, "is_flag", False) for o in p.opts}
    assert flags - {"--help", "-h", "--resume"} == FLAGS  # recorded commands leave --resume out, and run's has a value


def test_the_commands_have_the_options_that_are_carried_to_them() -> None:
    for option, names in CARRIED.items():
        for name in names:
            assert option in {o for p in COMMANDS[name].params for o in p.opts}, f"{name} {option}"
