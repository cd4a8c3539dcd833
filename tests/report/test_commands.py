"""Recorded command lines, changed to other commands on the same script."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

import mezzo
from mezzo.cli.parser import app
from mezzo.report.commands import CARRIED, DROPPED, FLAGS, TypedScript, function_call

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
    ("compare t.py --out 'o/{run}'", "t.py", ("diagnose", {}), "mezzo diagnose t.py --out 'o/{run}'"),
    ("diagnose t.py --out 'o/{run}'", "t.py", ("fallback", {}), "mezzo fallback t.py --out 'o/{run}'"),
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
    (
        "check --policies bf16 --budget 9m --write-patch t.py",
        "t.py",
        ("check", {"budget": "54m"}),
        "mezzo check --budget 54m --policies bf16 --write-patch t.py",
    ),
    (
        "check --policies bf16 --seeds 5 --on slurm t.py",
        "t.py",
        ("compare", {"policies": "fp32,bf16", "margin": "0.05"}),
        "mezzo compare --policies fp32,bf16 --margin 0.05 --seeds 5 --on slurm t.py",
    ),
    (
        "tune --vary lr=1,2 --vary b=3,4 --budget=10m t.py",
        "t.py",
        ("tune", {"budget": "30m"}),
        "mezzo tune --budget 30m --vary lr=1,2 --vary b=3,4 t.py",
    ),
    (
        "tune --policies bf16 t.py",
        "t.py",
        ("run", {"policy": "bf16", "channels-last": "", "compile": ""}),
        "mezzo run --policy bf16 --channels-last --compile t.py",
    ),
]


@pytest.mark.parametrize(("typed", "name", "asked", "text"), CASES)
def test_the_new_command(typed: str, name: str, asked: tuple[str, dict[str, str]], text: str) -> None:
    script = TypedScript.typed(["mezzo", *shlex.split(typed)], name)
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
    assert TypedScript.typed(words, "train.py") is None


def test_the_scripts_own_command() -> None:
    typed = TypedScript.typed(["mezzo", "compare", "--seeds", "2", "-m", "pkg.train", "--to", "{run}"], "pkg.train")
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
        (
            {"PADDLE_TRAINERS_NUM": "2", "PADDLE_LOCAL_SIZE": "2"},
            "python -m paddle.distributed.launch --nproc_per_node 2 mezzo audit t.py",
        ),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "mezzo audit t.py"),
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            "mezzo audit t.py",
        ),  # of several machines: their launcher is not known
    ],
)
def test_where_it_ran(variables: dict[str, str], text: str) -> None:
    typed = TypedScript.typed(["mezzo", "run", "t.py"], "t.py")
    assert typed is not None
    there = replace(typed, framework="torch 2.13.0", variables=variables)
    assert there.under("audit") == text
    started = text.startswith(("torchrun", "python"))
    assert there.under("fallback").startswith(("torchrun", "python")) is started
    assert not there.under("check").startswith(("torchrun", "python"))


def test_commands_of_other_frameworks() -> None:
    typed = TypedScript.typed(["mezzo", "run", "t.py"], "t.py")
    assert typed is not None
    keras = replace(typed, framework="keras 3.15.1 on tensorflow 2.21.0")
    assert [name for name in ON_SCRIPTS if keras.runs(name)] == ["check", "run", "compare", "audit", "diagnose"]
    jax = replace(typed, framework="keras 3.15.1 on jax 0.8.0")
    assert [name for name in ON_SCRIPTS if jax.runs(name)] == ["check", "run", "compare"]
    for inspected in ("torch 2.13.0", "keras 3.15.1 on torch 2.13.0", "paddle 3.3.0"):
        assert all(replace(typed, framework=inspected).runs(name) for name in ON_SCRIPTS)


def test_a_function_has_its_call() -> None:
    assert function_call("diagnose", "main.<locals>.train", "fp16") == 'mezzo.diagnose(train, policy="fp16")'
    assert function_call("audit", "<lambda>") == "mezzo.audit(train)"


NOT_CARRIED = {
    # an option, and why another command with an option of that name does not get it unless it is passed explicitly
    "--policy": "each next command names the policy that it is about",
    "--policies": "each next command names the policies that it is about",
    "--gpu": "check answers for it, and tune leaves configurations out by it",
    "--gpus": "compare predicts next to what it measures; predict names its own",
    "--seeds": "tune's are runs of each finalist",
    "--budget": "a check's time says nothing about a search's",
    "--checkpoint": "predict takes it for a model by name, and tune takes several plans",
    "--steps": "tune's are those of a round",
    "--compile": "diff compares what is compiled with what is not",
    "--vary": "tune's values are those to choose from, and diff's are two",
    "--resume": "it belongs to one command's folder",
}


def _taken(command: str) -> set[str]:
    found = {o for p in COMMANDS[command].params if p.param_type_name == "option" for o in p.opts}
    return found - {"--help", "-h", "--help-all", "-m"}


def _given(option: str) -> str:
    return option if option in FLAGS else f"{option} 3"


@pytest.mark.parametrize("command", ON_SCRIPTS)
def test_the_same_command_keeps_every_option_but_those_dropped_for_a_reason(command: str) -> None:
    taken = sorted(_taken(command) - ({"--resume"} if command != "run" else set()))  # recorded commands leave it out
    typed = TypedScript.typed(
        ["mezzo", command, *shlex.split(" ".join(map(_given, taken))), "t.py", "--own", "5"], "t.py"
    )
    assert typed is not None
    kept = " ".join(_given(option) for option in taken if option not in DROPPED)
    assert typed.under(command) == f"mezzo {command} {kept} t.py --own 5"


@pytest.mark.parametrize("command", ON_SCRIPTS)
def test_another_command_gets_every_option_that_it_has_too_or_there_is_a_reason(command: str) -> None:
    for other in set(ON_SCRIPTS) - {command}:
        for option in sorted(_taken(command) & _taken(other)):
            typed = TypedScript.typed(["mezzo", command, *shlex.split(_given(option)), "t.py"], "t.py")
            assert typed is not None
            got = option in shlex.split(typed.under(other))
            reason = option in DROPPED or option in NOT_CARRIED
            both = {command, other} <= {*CARRIED.get(option, ())}
            assert got is both, f"{command} to {other}: {option}"
            assert got or reason, f"{command} to {other} loses {option}, and no reason is given"


WRITERS = {
    # the files that write words as a shell line, and which command that is
    "cli/progress.py": "the command as typed, for a tracker",
    "commands/check/patches.py": "patch(1)",
    "commands/report/command.py": "mezzo report on the folder as typed",
    "cli/results.py": "mezzo report on the record",
    "cli/script.py": "identities, and the script's own command",
    "cli/usage.py": "the words as typed, one of them mended",
    "cli/first_word.py": "the words as typed, mended",
    "commands/predict/traced.py": "the words as typed, without one of script and model",
    "cli/words.py": "the words as typed, with the folder",
    "launch/targets.py": "the words as typed, with another script",
    "report/commands.py": "all next commands",
    "report/pages.py": "the command as typed",
    "report/log_entries.py": "the command as typed, for a tracker",
    "commands/compare/page.py": "the command as typed, for a tracker",
    "launch/ranks/meeting.py": "the commands of two processes that are not the same",
}


def test_next_commands_are_written_in_one_place() -> None:
    """A command that is assembled elsewhere forgets an option."""
    root = Path(mezzo.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"shlex\.(join|quote)", path.read_text(encoding="utf-8"))
    }
    assert found == WRITERS.keys()


def test_the_flags_are_those_of_the_commands() -> None:
    flags = {o for name in ON_SCRIPTS for p in COMMANDS[name].params if getattr(p, "is_flag", False) for o in p.opts}
    assert flags - {"--help", "-h", "--help-all"} == FLAGS


def test_the_commands_have_the_options_that_are_carried_to_them() -> None:
    for option, names in CARRIED.items():
        for name in names:
            assert option in {o for p in COMMANDS[name].params for o in p.opts}, f"{name} {option}"
