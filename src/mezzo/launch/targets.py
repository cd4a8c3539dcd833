"""Check, before anything runs, that the target is a script that can run; suggest what to type if it is not. Imports no torch."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import traceback
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from mezzo.children.script_text import spec_of
from mezzo.errors import UsageError

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?")
_TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python whose value is the next word."""

LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 2 --no-python",
    "accelerate": "accelerate launch --no_python",
    "deepspeed": "deepspeed --no_python",
    "mpirun": "mpirun -n 2",
    "mpiexec": "mpiexec -n 2",
    "srun": "srun",
}
"""Launchers, which start processes themselves, each with the words to type in front of ``mezzo``: Mezzo runs inside each process."""
_LAUNCHER_MODULES = {
    "torch.distributed.run": LAUNCHERS["torchrun"],
    "torch.distributed.launch": LAUNCHERS["torchrun"],
    "accelerate.commands.launch": LAUNCHERS["accelerate"],
    "paddle.distributed.launch": "python -m paddle.distributed.launch --nproc_per_node 2",
}
"""The same for launchers that are run by ``python -m``."""

_SKIPPED_FOLDERS = ("node_modules", "site-packages", "runs", "__pycache__")
_DEPTH, _MAX_FILES = 3, 5000


class Target(NamedTuple):
    """The target that the user typed."""

    name: str
    module: bool
    arguments: Sequence[str] = ()
    typed: Sequence[str] = ("mezzo", "run")
    """The words of the command before the name, without ``-m``."""

    def instead(self, *words: str, module: bool = False, arguments: Sequence[str] | None = None) -> str:
        """Return the command with ``words`` in place of the name."""
        rest = self.arguments if arguments is None else arguments
        return shlex.join([*self.typed, *(["-m"] if module else []), *words, *rest])


def check_target(target: Target) -> None:
    """Raise unless the target is a script or module that Python could run.

    Raises:
        UsageError: it does not exist, or is not Python.
        SyntaxError: it is Python with an error that Python would report without running anything.
    """
    if target.module:
        _check_module(target)
    else:
        _check_script(target)


# --- modules -----------------------------------------------------------------------------------------------------------------


def _check_module(target: Target) -> None:
    name = target.name.partition(":")[0]  # train.py:main is how a server's application is named
    if name.endswith(".py") or "/" in name or os.sep in name:
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".").replace("/", ".")
        as_module = target.instead(dotted, module=True)
        raise UsageError(
            f"-m {name} names a file; allowed: a module's name, as for python -m",
            hint=f"type: {target.instead(name) if Path(name).is_file() else as_module}",
        )
    if name in _LAUNCHER_MODULES:
        raise _launcher_refused(target, _LAUNCHER_MODULES[name])
    spec = spec_of(name)
    if spec is None:
        near = _near_modules(name)
        raise UsageError(
            f"there is no module {name!r} that python -m would find from this folder",
            hint=f"type: {target.instead(near[0], module=True)}"
            if near
            else "check the name and the folder, or pass the path of a script",
        )
    if spec.submodule_search_locations is not None and spec_of(f"{name}.__main__") is None:
        modules = sorted(info.name for info in pkgutil.iter_modules(list(spec.submodule_search_locations)))
        raise UsageError(
            f"{name!r} is a package without a __main__, so it cannot be run",
            hint=f"name one of its modules: {', '.join(f'-m {name}.{module}' for module in modules[:8]) or 'it has none'}",
        )


def _near_modules(name: str) -> list[str]:
    package, _, last = name.rpartition(".")
    if not package:
        packages = [p.name for p in Path().iterdir() if (p / "__main__.py").is_file()]
        return get_close_matches(last, [*(p.stem for p in Path().glob("*.py")), *packages], n=1)
    spec = spec_of(package)
    if spec is None:
        return [f"{near}.{last}" for near in _near_modules(package) if spec_of(f"{near}.{last}") is not None]
    modules = [info.name for info in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [f"{package}.{near}" for near in get_close_matches(last, modules, n=1)]


# --- scripts -----------------------------------------------------------------------------------------------------------------


def _check_script(target: Target) -> None:
    path = Path(target.name)
    _refuse_launchers(target)
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{target.name} is a notebook; allowed: a Python file",
            hint=f"jupyter nbconvert --to script {shlex.quote(target.name)}, then type: "
            + target.instead(str(path.with_suffix(".py"))),
        )
    if path.is_dir():
        _refuse_folder(target)
    if not path.is_file():
        raise UsageError(f"there is no script {target.name!r}", hint=_near_scripts(target))
    if path.suffix in (".sh", ".bash", ".zsh"):
        _refuse_shell_script(target)
    _check_source(target)


def _refuse_launchers(target: Target) -> None:
    name = Path(target.name).name
    if _PYTHON.fullmatch(name):
        rest = list(target.arguments)
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            del rest[: 2 if rest[0] in _TAKES_VALUE else 1]
        module = rest[:1] == ["-m"]
        rest = rest[1:] if module else rest
        raise UsageError(
            f"{target.name} is not a script; Mezzo starts Python itself",
            hint=f"type: {target.instead(*(rest[:1] or ['train.py']), module=module, arguments=rest[1:])}",
        )
    if name in LAUNCHERS:
        raise _launcher_refused(target, LAUNCHERS[name])


def before_mezzo(launcher: str, arguments: Sequence[str]) -> UsageError:
    """Return the refusal of a launcher that was typed as a command of Mezzo."""
    return _launcher_refused(Target(launcher, module=False, arguments=arguments), LAUNCHERS[launcher])


def _launcher_refused(target: Target, words: str) -> UsageError:
    first = next((n for n, word in enumerate(target.arguments) if word.endswith(".py")), None)
    after = [*target.typed, *(["train.py"] if first is None else target.arguments[first:])]
    return UsageError(
        f"{target.name} is not a script; it starts processes, and Mezzo runs inside each of them",
        hint=f"type: {words} {shlex.join(after)}",
    )


def _refuse_folder(target: Target) -> None:
    scripts = [path for path in Path(target.name).glob("*.py") if path.name != "__init__.py"]
    # Python runs a folder's __main__.py.
    scripts.sort(key=lambda path: (path.name != "__main__.py", "train" not in path.name, path))
    hint = f"type: {target.instead(str(scripts[0]))}" if scripts else "pass the path of the script that trains"
    if (Path(target.name) / "record.json").is_file():
        hint = f"type: mezzo report {shlex.quote(target.name)}"
    raise UsageError(f"{target.name} is a folder; allowed: a Python file", hint=hint)


def _near_scripts(target: Target) -> str:
    path = Path(target.name)
    if re.fullmatch(r"\w+(?:\.\w+)+", target.name) and path.suffix != ".py" and spec_of(target.name) is not None:
        return f"type: {target.instead(target.name, module=True)}"
    folder = path.parent if path.parent.is_dir() else Path()
    neighbours = [p.name for p in folder.glob("*.py")]
    wanted = path.name if path.suffix else f"{path.name}.py"
    near = get_close_matches(wanted, neighbours, n=1, cutoff=0.6)
    found = folder / near[0] if near else next((p for p in _below(Path()) if p.name == wanted), None)
    if found is None:
        return "pass the path of a Python file, or -m and the name of a module"
    return f"type: {target.instead(str(found))}"


def _below(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, to a limited depth and number."""
    left = _MAX_FILES
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        visited = [f for f in folders if not f.startswith((".", "_")) and f not in _SKIPPED_FOLDERS]
        folders[:] = sorted(visited) if depth < _DEPTH else []
        for name in sorted(files):
            left -= 1
            if left < 0:
                return
            if name.endswith(".py"):
                yield Path(place) / name


def _refuse_shell_script(target: Target) -> None:
    text = Path(target.name).read_text(encoding="utf-8", errors="replace")
    script = re.search(r"[\w./-]+\.py\b", text)
    raise UsageError(
        f"{target.name} is a shell script; allowed: a Python file",
        hint=f"type: {target.instead(script.group())}, with the arguments that the shell script passes to it"
        if script
        else "pass the Python file that it starts, with its arguments",
    )


def _check_source(target: Target) -> None:
    path = Path(target.name)
    if path.suffix == ".pyc" or zipfile.is_zipfile(path):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself prints them
            tree = compile(path.read_bytes(), target.name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: zero bytes
        if isinstance(error, SyntaxError) and path.suffix == ".py":
            raise
        raise UsageError(f"{target.name} is not Python", hint="pass the path of a Python file") from None
    except OSError as error:
        why = f"cannot read the script {target.name!r}: {error.strerror}"
        raise UsageError(why, hint="check its permissions") from None
    if isinstance(tree, ast.Module) and not tree.body:
        raise UsageError(f"{target.name} is empty", hint="save it first, or pass the script that trains")


def show_syntax_error(error: SyntaxError) -> str:
    """Return what Python prints for a script that it cannot compile."""
    return "".join(traceback.format_exception_only(error)).rstrip("\n")
