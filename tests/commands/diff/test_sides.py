"""What the two sides of a difference run, and what is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezzo.cli.script import Script
from mezzo.commands.diff import sides
from mezzo.commands.diff.sides import Side
from mezzo.errors import UsageError
from mezzo.observe.settings import ValuesSettings
from mezzo.policy import Policy

SCRIPT = Script(target="train.py", arguments=["--width", "8"])


def test_policies() -> None:
    a, b = sides.of_policies(SCRIPT, " as-is, bf16:fp32_modules=head ")
    assert (a.name, a.policy, a.script) == ("as-is", None, SCRIPT)
    assert (b.name, b.policy) == ("bf16:fp32_modules=head", Policy.parse("bf16:fp32_modules=head"))
    assert b.under(Policy.parse("fp16")).name == "fp16"


def test_compile() -> None:
    a, b = sides.of_compile(SCRIPT)
    assert (a.name, a.models, a.compiled) == ("eager", None, False)
    assert b.models is not None
    assert (b.name, b.models.compiles, b.compiled) == ("compiled", True, True)


def test_ranks() -> None:
    a, b = sides.of_ranks(SCRIPT, "1,4")
    assert [(side.name, side.ranks) for side in (a, b)] == [("1 process", 1), ("4 processes", 4)]


@pytest.mark.parametrize("option", ["batch-size", "--batch-size"])
def test_values_of_an_option(option: str) -> None:
    a, b = sides.of_values(SCRIPT, f"{option}=1, 8")
    assert [side.name for side in (a, b)] == ["--batch-size 1", "--batch-size 8"]
    assert b.script.arguments == ["--width", "8", "--batch-size", "8"]


def test_two_scripts() -> None:
    a, b = sides.of_scripts(SCRIPT, "new/train.py", ["--fast"])
    assert [(s.name, s.script.target, s.script.arguments) for s in (a, b)] == [
        ("train.py", "train.py", ["--fast"]),
        ("new/train.py", "new/train.py", ["--fast"]),
    ]
    assert [side.name for side in sides.of_scripts(SCRIPT, "new/other.py", [])] == ["train.py", "other.py"]


@pytest.mark.parametrize(
    ("of", "text", "message", "hint"),
    [
        (sides.of_policies, "bf16", "--policies bf16 has 1 policy; allowed: two", "--policies fp32,bf16"),
        (sides.of_policies, "fp32", "--policies fp32 has 1 policy; allowed: two", "--policies fp32,bf16"),
        (sides.of_policies, "a,b,c", "--policies a,b,c has 3 policies; allowed: two", "--policies fp32,a"),
        (
            sides.of_ranks,
            "2",
            "--ranks 2; allowed: two different numbers of processes, separated by a comma",
            "--ranks 1,2",
        ),
        (
            sides.of_ranks,
            "2,2",
            "--ranks 2,2; allowed: two different numbers of processes, separated by a comma",
            "--ranks 1,2",
        ),
        (
            sides.of_ranks,
            "0,2",
            "--ranks 0,2; allowed: two different numbers of processes, separated by a comma",
            "--ranks 1,2",
        ),
        (
            sides.of_ranks,
            "a,b",
            "--ranks a,b; allowed: two different numbers of processes, separated by a comma",
            "--ranks 1,2",
        ),
        (sides.of_values, "lr", "--vary lr; allowed: an option of the script and two values", "--vary batch-size=1,8"),
        (
            sides.of_values,
            "lr=1",
            "--vary lr=1; allowed: an option of the script and two values",
            "--vary batch-size=1,8",
        ),
        (
            sides.of_values,
            "=1,2",
            "--vary =1,2; allowed: an option of the script and two values",
            "--vary batch-size=1,8",
        ),
        (
            sides.of_values,
            "lr=1,2,3",
            "--vary lr=1,2,3; allowed: an option of the script and two values",
            "--vary batch-size=1,8",
        ),
    ],
)
def test_what_is_refused(of: Callable[[Script, str], Any], text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        of(SCRIPT, text)
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits of a script in a folder, in which the command is typed."""
    root = tmp_path / "repository"
    (root / "work").mkdir(parents=True)
    git(root, "init", "-q")
    for text in ("print(1)\n", "print(2)\n"):
        (root / "work" / "train.py").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", text.strip())
    (root / "work" / "train.py").write_text("print(3)\n")
    (root / "work" / "new.py").write_text("")
    monkeypatch.chdir(root / "work")
    return root


def test_the_script_of_a_commit(repository: Path, tmp_path: Path) -> None:
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    folder = tmp_path / "commit"
    then, now = sides.of_checkout(SCRIPT, "HEAD~1", folder)

    assert then.name == git(repository, "rev-parse", "--short", "HEAD~1")
    assert (now.name, now.script, now.import_paths) == ("now", SCRIPT, ())
    assert Path(then.script.target).read_text() == "print(1)\n"
    assert then.import_paths == (str(folder / "work"), str(folder), str(folder / "src"))
    assert then.work_folder is None  # it finds its data where it is
    assert (git(repository, "status", "--porcelain"), git(repository, "worktree", "list")) == before


def test_the_module_of_a_commit(repository: Path, tmp_path: Path) -> None:
    module = Script(target="train", as_module=True)
    then, _ = sides.of_checkout(module, "HEAD", tmp_path / "commit")
    assert (then.script, then.work_folder) == (module, str(tmp_path / "commit" / "work"))


def refused(script: str, commit: str, folder: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        sides.of_checkout(Script(target=script), commit, folder)
    return caught.value


def test_no_such_commit(repository: Path, tmp_path: Path) -> None:
    error = refused("train.py", "nowhere", tmp_path / "commit")
    assert error.message == "there is no commit 'nowhere': fatal: Needed a single revision"
    assert error.hint == "git log --oneline lists the commits"


@pytest.mark.parametrize("script", ["new.py", "../../elsewhere.py"])
def test_no_such_script_in_the_commit(repository: Path, tmp_path: Path, script: str) -> None:
    error = refused(script, "HEAD", tmp_path / "commit")
    assert error.message == f"there is no {script} in {git(repository, 'rev-parse', '--short', 'HEAD')}"
    assert error.hint == f"name a commit that has it: git log --oneline -- {script}"


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    error = refused("train.py", "HEAD", tmp_path / "commit")
    assert error.message.startswith("--checkout needs a git repository: fatal: not a git repository")


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refused("train.py", "HEAD", tmp_path / "commit")
    assert error.message == "--checkout needs git, which is not installed"
    assert error.hint == "compare two scripts: mezzo diff old.py new.py"


def test_the_values_of_a_run_lie_beside_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    side = Side(name="now", script=Script(target="train.py"), policy=Policy.parse("bf16"), import_paths=("x",))
    request = side.request(Path("runs/a"), ValuesSettings(steps=(1,)))
    assert request.record_path == str(tmp_path / "runs" / "a" / "record.json")
    assert isinstance(request.observe, ValuesSettings)
    assert request.observe.path == str(tmp_path / "runs" / "a" / "values.npz")
    assert (request.import_paths, str(request.policy)) == (("x",), "bf16")
