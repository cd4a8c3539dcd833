"""The environments that make creates, updates and removes: a stand-in for Python notes what it was told, and nothing is installed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from optional_libraries import LIBRARIES
from paths import ROOT, TESTS

if not (ROOT / "Makefile").is_file():
    pytest.skip("the source tree is not beside these tests", allow_module_level=True)

STAND_IN = """#!/bin/sh
echo "$(basename "$(dirname "$(dirname "$0")")"): $*" >> "$NOTES"
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
  *" install "*) test ! -e "$NOTES.fails" ;;
esac
"""


class Clone:
    """A clone of the project with no more than make reads, in a folder with a space, and the stand-in outside it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a b" / "mezzo"
        (self.root / ".ci").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/environment"):
            shutil.copy(ROOT / name, self.root / name)
        for path in ROOT.glob("requirements-*.txt"):
            shutil.copy(path, self.root)
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.notes = folder / "notes"
        self.venv = self.root / ".venv"

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.notes.write_text("")
        unset = ("VENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"NOTES": str(self.notes)}
        command = ["make", f"PYTHON={self.python}", *words]
        return subprocess.run(command, cwd=self.root, env=env, check=False, capture_output=True, text=True)

    def installed(self) -> list[str]:
        """Return what pip was told to install by the last call, in its words after the options that all have."""
        return re.findall(r"pip install --quiet --no-compile (.*)", self.notes.read_text())

    def touch_the_project(self) -> None:
        """Make pyproject.toml newer than every environment."""
        newest = max(path.stat().st_mtime for path in self.venv.rglob("*") if path.is_file())
        os.utime(self.root / "pyproject.toml", (newest + 5, newest + 5))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def optional() -> dict[str, list[str]]:
    """Return the extras of pyproject.toml."""
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return extras


STAGES = {
    ".venv/.demo": ".[examples]",
    ".venv/.test": ".[test,check,triton,fp8]",
    ".venv/.ready": ".[dev]",
}


@pytest.mark.parametrize(("stage", "packages"), STAGES.items())
def test_a_stage_is_installed_once_and_says_first_what_and_how_long(stage: str, packages: str, clone: Clone) -> None:
    done = clone.make(stage)
    assert done.returncode == 0, done.stderr
    assert clone.installed() == [f"--constraint constraints.txt --editable {packages}"]
    said = next(line for line in done.stderr.splitlines() if line)
    assert re.fullmatch(r"creating \.venv, for .*: .*\d+ packages, [\d.]+ GB.* about [\d.]+ minutes? on 2 cores", said)
    again = clone.make(stage)
    assert (again.returncode, clone.notes.read_text()) == (0, "")


def test_a_later_stage_has_the_earlier_ones(clone: Clone) -> None:
    assert clone.make(".venv/.ready").returncode == 0
    assert clone.make(".venv/.demo", ".venv/.test").returncode == 0
    assert clone.notes.read_text() == ""


def test_a_newer_project_updates_the_environment_and_removes_nothing(clone: Clone) -> None:
    clone.make(".venv/.demo")
    (clone.venv / "mine").write_text("kept")
    clone.touch_the_project()
    done = clone.make(".venv/.demo")
    assert done.returncode == 0
    assert "updating .venv, for the demo" in done.stderr
    assert len(clone.installed()) == 1
    assert "venv" not in [line.split()[-2] for line in clone.notes.read_text().splitlines()]
    assert (clone.venv / "mine").read_text() == "kept"


def test_an_interrupted_installation_is_continued(clone: Clone) -> None:
    fails = Path(f"{clone.notes}.fails")
    fails.touch()
    assert clone.make(".venv/.demo").returncode != 0
    assert not (clone.venv / ".demo").exists()
    fails.unlink()
    assert clone.make(".venv/.demo").returncode == 0
    assert len(clone.installed()) == 1


def test_an_environment_of_before_there_was_a_mark_is_updated(clone: Clone) -> None:
    clone.make(".venv/.ready")
    (clone.venv / ".mezzo").unlink()
    clone.touch_the_project()
    assert clone.make(".venv/.ready").returncode == 0
    assert (clone.venv / ".mezzo").exists()


def own_environment(clone: Clone) -> str:
    clone.venv.mkdir()
    (clone.venv / "pyvenv.cfg").touch()
    return ".venv is an environment of your own: make did not create it, and changes nothing in it"


def folder_of_other_things(clone: Clone) -> str:
    clone.venv.mkdir()
    (clone.venv / "thesis.tex").touch()
    return ".venv is a folder of other things: make did not create it, and changes nothing in it"


def link(clone: Clone) -> str:
    target = clone.root.parent / "shared"
    target.mkdir()
    for name in ("pyvenv.cfg", ".mezzo"):  # even one of another clone's
        (target / name).touch()
    clone.venv.symlink_to(target)
    return f".venv is a symbolic link, to {target}: what it leads to would be changed"


def broken_link(clone: Clone) -> str:
    clone.venv.symlink_to("nowhere")
    return ".venv is a symbolic link, to nowhere: what it leads to would be changed"


def file(clone: Clone) -> str:
    clone.venv.touch()
    return ".venv is no folder"


@pytest.mark.parametrize("prepare", [own_environment, folder_of_other_things, link, broken_link, file])
@pytest.mark.parametrize("slash", ["", "/"])
def test_what_is_not_ours_is_refused_and_outlives_clean(prepare: object, slash: str, clone: Clone) -> None:
    message = prepare(clone)  # type: ignore[operator]
    before = sorted((path, path.lstat().st_mtime_ns) for path in clone.root.parent.rglob("*"))
    for target in (".demo", ".test", ".ready"):
        done = clone.make(f"VENV=.venv{slash}", f".venv{slash}/{target}")
        assert done.returncode == 2
        assert f".ci/environment: {message}\n  hint: move it away, or name another folder: make VENV=/some/folder" in (
            done.stderr
        )
    assert clone.notes.read_text() == ""
    done = clone.make(f"VENV=.venv{slash}", "clean")
    assert done.returncode == 0
    assert ".venv is left alone: make did not create it" in done.stderr
    assert sorted((path, path.lstat().st_mtime_ns) for path in clone.root.parent.rglob("*")) == before


def test_an_empty_folder_may_be_used(clone: Clone) -> None:
    clone.venv.mkdir()
    assert clone.make(".venv/.demo").returncode == 0


def test_an_old_python_is_refused_before_anything_is_made(clone: Clone) -> None:
    clone.python.write_text('#!/bin/sh\ncase "$*" in *version*) echo "Python 3.9.2"; exit 1 ;; esac\n')
    done = clone.make(".venv/.demo")
    assert done.returncode == 2
    assert f"Mezzo needs Python 3.10 or later; {clone.python} is Python 3.9.2\n  hint: make PYTHON=python3.12" in (
        done.stderr
    )
    assert not clone.venv.exists()


def test_clean_removes_what_make_made_and_no_runs(clone: Clone) -> None:
    clone.make(".venv/.demo", ".venv-keras/.ready")
    for name in ("build", "dist", "runs/demo", "runs/frameworks", "runs/mine"):
        (clone.root / name).mkdir(parents=True)
    done = clone.make("clean")
    assert (done.returncode, done.stderr) == (0, "")
    kept = {"Makefile", "pyproject.toml", "constraints.txt", ".ci", "runs"}
    kept |= {path.name for path in ROOT.glob("requirements-*.txt")}
    assert {path.name for path in clone.root.iterdir()} == kept
    assert [path.name for path in (clone.root / "runs").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("stage", "installs"),
    {
        ".venv-keras/.ready": ["--requirement requirements-keras.txt --editable .[test]"],
        ".venv-paddle/.ready": ["--requirement requirements-paddle.txt --editable .[test]"],
        ".venv-trainers/.ready": [
            "--requirement requirements-trainers.txt --editable .[test]",
            "--no-deps fastai==2.8.12",
        ],
        ".venv-cuda/.installed": [
            "torch>=2.11 --index-url https://download.pytorch.org/whl/cu130",
            "--editable .[test]",
        ],
    }.items(),
)
def test_other_environments_follow_the_same_rules(stage: str, installs: list[str], clone: Clone) -> None:
    folder = clone.root / stage.partition("/")[0]
    words = [stage, f"CUDA_PYTHON={clone.python}"]
    folder.mkdir()
    (folder / "pyvenv.cfg").touch()
    done = clone.make(*words)
    assert done.returncode == 2
    assert f"{folder.name} is an environment of your own" in done.stderr
    shutil.rmtree(folder)
    done = clone.make(*words)
    assert done.returncode == 0, done.stderr
    assert clone.installed() == installs
    assert re.search(rf"^creating {folder.name}, for .*[:,] about \d GB and \d minutes on 2 cores", done.stderr, re.M)


NEEDS = {
    "demo": ".demo",
    "test": ".test",
    "static": ".test",
    "check": ".test",
    "test-slow": ".ready",
    "test-all": ".ready",
    "test-wheel": ".ready",
    "docs": ".ready",
    "bench": ".ready",
}


@pytest.mark.parametrize(("target", "stage"), NEEDS.items())
def test_a_command_installs_its_stage_and_no_other(target: str, stage: str, clone: Clone) -> None:
    done = clone.make("--dry-run", target)
    assert re.findall(r"--editable '(.*?)'", done.stdout) == [STAGES[f".venv/{stage}"]]


def test_nothing_clears_an_environment() -> None:
    for path in (ROOT / "Makefile", *(ROOT / ".ci").iterdir()):
        assert "--clear" not in path.read_text(encoding="utf-8"), path


# --- what CI runs --------------------------------------------------------------------------------

IMPORTED = {"IPython": "ipython", "mlflow": "mlflow-skinny", "torch": ""}
OF_OTHER_ENVIRONMENTS = {"keras", "jax", "tensorflow"}


def distributions(extra: str) -> set[str]:
    """Return the packages that an extra names, those of the extras that it names included."""
    found: set[str] = set()
    for requirement in optional()[extra]:
        if inner := re.fullmatch(r"mezzo\[(.*)\]", requirement):
            found = found.union(*(distributions(name) for name in inner[1].split(",")))
        else:
            found.add(re.split(r"[<>=; ]", requirement)[0])
    return found


def test_the_last_stage_has_every_library_that_a_test_would_be_skipped_without() -> None:
    """CI runs all tests in it, so that none is left out there."""
    skipping = {
        str(call.args[0].value).partition(".")[0]
        for path in TESTS.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "pytest.importorskip"
        and isinstance(call.args[0], ast.Constant)
    }
    assert {"lightning", "transformers", "accelerate", "wandb", "triton", "torchao"} <= skipping
    needed = {IMPORTED.get(name, name) for name in skipping - OF_OTHER_ENVIRONMENTS} - {"", "submitit"}
    assert needed <= distributions("dev")
    assert "make test-all" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_what_make_test_leaves_out_by_name_is_in_the_last_stage_only() -> None:
    stage = set().union(*(distributions(extra) for extra in ("test", "check", "triton", "fp8")))
    left_out = {IMPORTED.get(name, name) for name in LIBRARIES}
    assert left_out <= distributions("dev")
    assert left_out & stage == set()


def test_hints_name_packages_and_no_extra_of_a_project_that_pip_may_not_find() -> None:
    """In a clone that is on the path, pip install 'mezzo[fp8]' would ask an index for Mezzo; the package itself installs everywhere."""
    named = set().union(*(optional()[extra] for extra in optional()))
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "mezzo[" not in text, path
        assert set(re.findall(r"pip install '([^']*)'", text)) <= named, path


# --- the publishing workflow ---------------------------------------------------------------------


def test_the_publishing_workflow_checks_before_it_publishes() -> None:
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"release": {"types": ["published"]}}  # YAML 1.1 reads the word on as true
    jobs = workflow["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None,
        "check": "build",
        "publish": "check",
    }
    assert workflow["permissions"] == {}
    writing = {name for name, job in jobs.items() if "write" in str(job.get("permissions"))}
    assert writing == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text
    assert "password" not in str(jobs)
    supported = [str(version) for version in jobs["check"]["strategy"]["matrix"]["python"]]
    assert supported == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"make ([\w-]+)", "\n".join(commands))
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["dist"]
    assert all(re.search(rf"^{target}:", rules, re.M) for target in targets)
    scripts = re.findall(r"\.ci/\w+", "\n".join(commands))
    assert scripts == [".ci/installed"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
