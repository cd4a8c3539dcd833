"""The two sides of a difference: what to run, and under which name. Imports no torch.

A commit is unpacked into a temporary folder, from which its side imports: the script runs in the same working folder with the same
arguments, so that it finds its data, and a package that is installed from the repository is imported from the commit.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from mezzo.cli.script import Script
from mezzo.cli.words import with_value
from mezzo.errors import UsageError
from mezzo.launch.request import ModelChanges, Request
from mezzo.observe.settings import ValuesSettings
from mezzo.policy import Policy
from mezzo.records import AS_IS

Mode: TypeAlias = Literal["policies", "checkout", "compile", "ranks", "vary", "scripts", "records"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side."""

    name: str
    script: Script
    policy: Policy | None = None
    """None for the script's own precision."""
    models: ModelChanges | None = None
    import_paths: tuple[str, ...] = ()
    work_folder: str | None = None
    compiled: bool = False
    ranks: int = 0
    """Number of processes that the script trains in together; 0 for one without a process group."""

    def request(self, folder: Path, settings: ValuesSettings) -> Request:
        """Return the request for a run of this side, whose record and values go into a folder."""
        values = settings.model_copy(update={"path": str((folder / "values.npz").absolute())})
        return self.script.request(
            self.policy,
            folder=folder.absolute(),
            observe=values,
            models=self.models,
            import_paths=self.import_paths,
            work_folder=self.work_folder,
        )

    def under(self, policy: Policy) -> Side:
        """Return this side under another policy."""
        return replace(self, policy=policy, name=str(policy))


def of_policies(script: Script, text: str) -> tuple[Side, Side]:
    """Return the sides of ``--policies A,B``.

    Raises:
        UsageError: there are not two.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) != 2:
        first = ["fp32", *(name for name in names if name != "fp32")][:2]
        raise UsageError(
            f"--policies {text} has {len(names)} {'policy' if len(names) == 1 else 'policies'}; allowed: two",
            hint=f"type: {with_value('--policies', ','.join(first if len(first) == 2 else ['fp32', 'bf16']))}",
        )
    policies = [None if name == AS_IS else Policy.of(name) for name in names]
    a, b = (Side(name=name, script=script, policy=policy) for name, policy in zip(names, policies, strict=True))
    return a, b


def of_compile(script: Script) -> tuple[Side, Side]:
    """Return the sides of ``--compile``: the script as it is, and with its models compiled."""
    compiled = Side(name="compiled", script=script, models=ModelChanges(compiles=True), compiled=True)
    return Side(name="eager", script=script), compiled


def of_ranks(script: Script, text: str) -> tuple[Side, Side]:
    """Return the sides of ``--ranks N,M``: the script in so many processes of this machine.

    Raises:
        UsageError: there are not two different numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words) or words[0] == words[1]:
        raise UsageError(
            f"--ranks {text}; allowed: two different numbers of processes, separated by a comma",
            hint=f"type: {with_value('--ranks', '1,2')}",
        )
    a, b = (
        Side(name=f"{word} {'process' if word == '1' else 'processes'}", script=script, ranks=int(word))
        for word in words
    )
    return a, b


def of_values(script: Script, text: str) -> tuple[Side, Side]:
    """Return the sides of ``--vary OPTION=A,B``: the script with one value of its own option, and with another.

    Raises:
        UsageError: there are not two values.
    """
    name, equals, rest = text.partition("=")
    found = [value.strip() for value in rest.split(",") if value.strip()]
    if not (name and equals and len(found) == 2):
        raise UsageError(
            f"--vary {text}; allowed: an option of the script and two values",
            hint=f"type: {with_value('--vary', 'batch-size=1,8')}",
        )
    option = name if name.startswith("-") else f"--{name}"
    a, b = (
        Side(name=f"{option} {value}", script=replace(script, arguments=[*(script.arguments or ()), option, value]))
        for value in found
    )
    return a, b


def of_scripts(script: Script, other: str, arguments: Sequence[str]) -> tuple[Side, Side]:
    """Return the sides of two scripts with the same arguments."""
    first, second = (replace(script, target=target, arguments=[*arguments]) for target in (script.target, other))
    names = (Path(first.target).name, Path(second.target).name)
    if names[0] == names[1]:
        names = first.target, second.target
    return Side(name=names[0], script=first), Side(name=names[1], script=second)


def of_checkout(script: Script, commit: str, folder: Path) -> tuple[Side, Side]:
    """Return the sides of ``--checkout COMMIT``: the script as it was, and as it is; ``folder`` is for the files of the commit.

    Raises:
        UsageError: this is no git repository, or the commit or the script in it does not exist.
    """
    root = Path(_git("rev-parse", "--show-toplevel", says="--checkout needs a git repository").strip())
    name = _git(
        "rev-parse", "--verify", "--short", f"{commit}^{{commit}}", says=f"there is no commit {commit!r}"
    ).strip()
    data = subprocess.run(["git", "-C", str(root), "archive", name], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        try:
            archive.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise UsageError(
                f"the files of {name} cannot be unpacked: {error}",
                hint=f"check it out, and compare two scripts: git worktree add ../{name} {name}",
            ) from None
    here = Path.cwd().resolve().relative_to(root.resolve())
    paths = (str(folder / here), str(folder), str(folder / "src"))
    now = Side(name="now", script=script)
    if script.as_module:
        return Side(name=name, script=script, import_paths=paths, work_folder=str(folder / here)), now
    path = Path(script.target).resolve()
    if not path.is_relative_to(root.resolve()) or not (folder / path.relative_to(root.resolve())).is_file():
        raise UsageError(
            f"there is no {script.target} in {name}",
            hint=f"name a commit that has it: git log --oneline -- {script.target}",
        )
    old = replace(script, target=str(folder / path.relative_to(root.resolve())))
    return Side(name=name, script=old, import_paths=paths), now


def _git(*words: str, says: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UsageError(
            "--checkout needs git, which is not installed", hint="compare two scripts: mezzo diff old.py new.py"
        ) from None
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()
        raise UsageError(f"{says}: {why[0] if why else error}", hint="git log --oneline lists the commits") from None
