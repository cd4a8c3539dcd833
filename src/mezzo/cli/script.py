"""A training script on the command line: checked, run in child processes or resumed, its record written and printed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from mezzo.children.signals import Stop, stoppable
from mezzo.cli import options, results
from mezzo.cli.folders import new_folder, resumed_folder
from mezzo.cli.progress import shown
from mezzo.cli.ranks import refuse_in_several
from mezzo.cli.words import RESUME, resuming, target_of, typed, typed_before
from mezzo.errors import UsageError
from mezzo.readable import readable
from mezzo.secrets import hidden
from mezzo.version import VERSION

if TYPE_CHECKING:
    from mezzo.launch.request import ModelChanges, Request, StandIn
    from mezzo.launch.targets import Target
    from mezzo.policy import Policy
    from mezzo.records import AnyRecord
    from mezzo.report.commands import TypedScript as Typed
    from mezzo.studies.loop import Finished


R = TypeVar("R", bound="AnyRecord")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with the options of every command on a script; only commands of several runs have ``--resume``."""

    target: options.TargetArgument
    arguments: options.Arguments = None
    as_module: options.AsModule = False
    out: options.Out = None
    resume: options.Resume = None
    log_to: options.LogTo = None
    as_json: options.Json = False
    verbose: options.Verbose = False

    @property
    def kind(self) -> Literal["script", "module"]:
        """What ``target`` names."""
        return "module" if self.as_module else "script"

    @property
    def framework(self) -> str:
        """The framework that the script trains in."""
        from mezzo.frameworks import framework_of

        return framework_of(self.target, kind=self.kind)

    @property
    def command(self) -> tuple[str, ...]:
        """The command as typed, for records; a resumed command completes the record of the one it continues, so it has that one's words."""
        return typed_before(len(self.arguments or ())) if self.resume else typed()

    @property
    def retyped(self) -> Typed:
        """The command as typed, from which other commands on the same script are written."""
        from mezzo.measure.environment import variables_that_matter
        from mezzo.report.commands import TypedScript as Typed

        script = Typed.typed(self.command, readable(self.target))
        assert script is not None, self.command  # the command that is running
        return replace(script, framework=self.framework, variables=variables_that_matter(os.environ))

    def check(self, *policies: Policy | None) -> None:
        """Refuse a target that is not a script or module, or cannot run under a policy; show a syntax error as Python does."""
        from mezzo.launch.targets import check_target, show_syntax_error

        target = target_of(self.target, self.arguments, module=self.as_module)
        try:
            check_target(target)
            self.check_supported(" ".join(("mezzo", *typed()[1:2])))
            for policy in policies:
                stand_in_for(target, policy=policy)
        except SyntaxError as error:
            print(show_syntax_error(error), file=sys.stderr)
            raise typer.Exit(1) from None
        if typed()[1:2] not in (("run",), ("watch",)):  # these run it once, so it can read its standard input directly
            keep_input_for(self.target, as_module=self.as_module)

    def check_supported(self, feature: str) -> None:
        """Refuse the script if a command or an option does not support its framework."""
        check_supported(feature, self.target, as_module=self.as_module)

    def request(self, policy: Policy | None, *, folder: Path, **more: Any) -> Request:
        """Return a request for a child process that writes its record to ``folder``; no policy means the script's own precision."""
        from mezzo.launch.request import Request

        target = target_of(self.target, self.arguments, module=self.as_module)
        fields: dict[str, Any] = {"arguments": target.arguments, **more}
        return Request(
            target=self.target,
            kind=self.kind,
            framework=self.framework,
            stand_in=stand_in_for(target, policy=policy),
            policy=policy,
            record_path=str(folder / "record.json"),
            command=self.command,
            **fields,
        )

    def identity(self, **more: str) -> dict[str, str]:
        """Return what must not change for an interrupted command to continue; ``more`` are options of the command."""
        from mezzo.children.script_text import own_sources
        from mezzo.measure.environment import package_version, variables_that_compute
        from mezzo.measure.standard_input import digest_of_input

        text, sources = hashlib.sha256(), list(own_sources(self.target, kind=self.kind))
        for source in sources:
            text.update(source.encode())
        return {
            "script": self.target,
            "the script's text": text.hexdigest(),
            "its arguments": shlex.join(hidden(self.arguments or ())),
            "its standard input": digest_of_input(sources),
            "its environment variables": shlex.join(f"{k}={v}" for k, v in variables_that_compute(os.environ).items()),
            **more,
            "mezzo": VERSION,
            "torch": package_version("torch") or "",
            "python": platform.python_version(),
        }

    def folder(self, name: str, *, leaves: Sequence[str] = ()) -> Path:
        """Return the folder for the command's records; ``name`` is part of a new folder's name."""
        if self.resume is not None:
            return resumed_folder(self.resume, out=self.out)
        return new_folder(self.out, f"{Path(self.target).name.removesuffix('.py')}-{name}", leaves=leaves)

    def finish(self, record: AnyRecord, folder: Path, *, after_script: bool = False) -> None:
        """Write ``record`` and its report, and print it."""
        results.finish(
            record,
            folder,
            as_json=self.as_json,
            log_to=self.log_to,
            typed=self.target,
            after_script=after_script,
            verbose=self.verbose,
        )

    def say_stopped(self, what: str, folder: Path) -> None:
        """Note on standard error ``what`` is kept in ``folder``, and the command that continues from there."""
        results.note(f"{what} in {folder}. To continue, type:")
        print(f"  {resuming(folder, num_arguments=len(self.arguments or ()))}", file=sys.stderr)


def keep_input_for(target: str, *, as_module: bool) -> None:
    """Save what a script reads from standard input, so that each of its runs can read it."""
    from mezzo.children.script_text import own_sources
    from mezzo.measure.standard_input import keep_input

    keep_input(own_sources(target, kind="module" if as_module else "script"), say=results.note)


def with_groups(command: Callable[..., None], *, resumes: bool = False) -> Callable[..., None]:
    """Split a command's groups of options, so that the parser sees one parameter per option.

    Args:
        command: a function whose parameters are options or dataclasses of options. Of a ``Script``, target and arguments come
            first, and its options last.
        resumes: whether the script has ``--resume``.
    """
    parameters = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in parameters if is_dataclass(one.annotation)}
    fields = {name: dict(signature(kind, eval_str=True).parameters) for name, kind in groups.items()}
    of_script = fields.get("script", {})
    if not resumes:
        of_script.pop("resume", None)

    @wraps(command)
    def typed_command(**given: Any) -> None:
        grouped = {name: kind(**{field: given.pop(field) for field in fields[name]}) for name, kind in groups.items()}
        command(**grouped, **given)

    flat = [field for one in parameters for field in fields.get(one.name, {one.name: one}).values()]
    flat.sort(key=lambda one: one.name in [*of_script][2:])  # after the command's own
    typed_command.__signature__ = Signature([one.replace(kind=one.KEYWORD_ONLY) for one in flat])  # type: ignore[attr-defined]
    typed_command.__annotations__ = {one.name: one.annotation for one in flat}
    return typed_command


def check_supported(feature: str, target: str, *, as_module: bool) -> None:
    """Refuse a script in a framework that a command (``mezzo tune``) or an option (``--guard``) does not support.

    Raises:
        ScriptError: names the framework, those that are allowed, and what to do instead.
    """
    from mezzo.launch.support import LIMITED, refusal, stage_of

    if feature in LIMITED:  # the framework is read from the script's files, which takes time
        refused = refusal(feature, stage_of(target, kind="module" if as_module else "script"), target=target)
        if refused is not None:
            raise refused


def observed_exit_code(record: AnyRecord) -> int:
    """Return the exit code for the record of an observed run: the script's own, and never 0 if nothing was observed."""
    if record.kind == "run":
        return record.exit_code or 1
    return record.run.exit_code if record.kind in ("audit", "ranges") else 1


def run_and_finish(
    script: Script,
    run: Callable[[Request], R],
    *,
    policy: Policy | None,
    name: str,
    shows_progress: bool = True,
    in_folder: Callable[[Path], dict[str, Any]] = lambda folder: {},
    **fields: Any,
) -> tuple[R, Stop]:
    """Run a script that prints to the terminal, then write, report and print its record.

    Args:
        script: the script, as it was typed.
        run: runs a request in child processes.
        policy: the policy to run under; None is the script's own precision.
        name: part of a new folder's name.
        shows_progress: whether to show the progress of its runs on standard error.
        in_folder: returns the fields of the request that name files, given the folder of its record.
        fields: further fields of the request.

    Returns:
        The record, and the signal that stopped the command, if one did.
    """
    script.check(policy)
    folder = script.folder(name)
    request = script.request(policy, folder=folder, output_to_stderr=script.as_json, **fields, **in_folder(folder))
    with stoppable() as stop:
        with shown() if shows_progress else nullcontext():
            record = run(request)
        script.finish(record, folder, after_script=True)
    return record, stop


def changes_of(
    script: Script, *, channels_last: bool = False, compiles: bool = False, checkpoint: str = ""
) -> ModelChanges | None:
    """Return the requested changes to the script's models; None if there are none.

    Raises:
        ScriptError: the models of this script cannot be changed.
    """
    from mezzo.launch.request import ModelChanges

    requested = {
        "--channels-last": channels_last,
        "--compile": compiles,
        f"--checkpoint {checkpoint}": bool(checkpoint),
    }
    option = next((name for name, wanted in requested.items() if wanted), None)
    if option is None:
        return None
    script.check_supported(option.split()[0])
    refuse_in_several(option, hint="make the change in the script, before it makes its models parallel")
    return ModelChanges(channels_last=channels_last, compiles=compiles, checkpoint=checkpoint)


_RUNS = "mezzo.compat.apex"


def stand_in_for(target: Target, *, policy: Policy | None) -> StandIn | None:
    """Return the stand-in for a script that may need Apex, if Apex is not installed; None for any other script.

    Raises:
        UsageError: the script is to keep its own precision, and Apex's loss scale would be mistaken for part of the loss.
    """
    from mezzo.children.script_text import needs
    from mezzo.launch.request import StandIn
    from mezzo.records import Note

    need = needs("apex", target.name, kind="module" if target.module else "script")
    if need == "no" or _is_installed("apex"):
        return None
    if policy is None and need == "perhaps":  # it may run without Apex
        return None
    if policy is None:
        alone = shlex.join(["python", "-m", _RUNS, *(["-m"] if target.module else []), target.name, *target.arguments])
        instead = target._replace(typed=_under_fp16(target)).instead(target.name, module=target.module)
        raise UsageError(
            f"{target.name} imports apex, which is not installed; Mezzo can run it only under a policy that replaces apex.amp",
            hint=f"type: {instead}, or, without a record: {alone}",
        )
    why = f"apex is not installed: {_RUNS} stands in for it, and the policy replaces apex.amp"
    return StandIn(module=_RUNS, reason=Note(what="apex.amp", value="off", reason=why))


def _is_installed(name: str) -> bool:
    """Return whether a package can be imported; a mere folder of that name, such as a cloned repository, has no origin."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _under_fp16(target: Target) -> list[str]:
    from mezzo.records import AS_IS

    words = [word.replace(AS_IS, "fp16") for word in target.typed]
    return words if words != list(target.typed) else [*words, "--policy", "fp16"]


def finished_before(
    script: Script, folder: Path, what: str, *, say: Callable[[str], None], **identity: str
) -> Finished:
    """Return what an earlier command finished in the folder; empty, with the reason printed, if that was a different command.

    Args:
        script: the script, as it was typed.
        folder: the command's folder.
        what: a name for the command's work: ``check``, ``comparison`` or ``search``.
        say: prints a line.
        identity: options of the command that must not have changed.

    Raises:
        UsageError: ``--resume`` was typed, and there is nothing to continue, or it was a different script.
    """
    from mezzo.studies.loop import Finished

    options = {name.replace("_", "-"): value for name, value in identity.items()}
    finished = Finished(folder, script.identity(**{f"--{name}": value for name, value in options.items()}), what=what)
    if script.resume and finished.why_restart:
        raise UsageError(
            f"{RESUME} cannot continue in {folder}: {finished.why_restart}",
            hint=f"leave out {RESUME} to start over, or undo the change",
        )
    if script.resume and not finished.found:
        raise UsageError(
            f"{RESUME}: {folder} has no {what} to continue; allowed: a folder in which one was started",
            hint=f"leave out {RESUME} to start one",
        )
    if finished.why_restart:
        say(f"starting over: {finished.why_restart}")
    return finished
