"""``mezzo check``: which precision a script should train in, with one answer."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mezzo.cli.budget import Budget, seconds_of
from mezzo.cli.help.shown import HelpPage
from mezzo.cli.machines import Machine, machine_of, name_of
from mezzo.cli.options import shared as options
from mezzo.cli.options import values
from mezzo.cli.options.clusters import Jobs, On, engine_of
from mezzo.cli.progress import shown
from mezzo.cli.results import write
from mezzo.cli.resumed import finished_before
from mezzo.cli.script import Script
from mezzo.cli.words import with_value
from mezzo.commands.check.conclusion import CheckOptions, check_record, formats_of, time_for_runs_s
from mezzo.devices import Device
from mezzo.errors import PolicyError, UsageError
from mezzo.formats import BF16, E4M3, FP16, FP32, TF32
from mezzo.launch.process.command_signals import Stopped, stoppable
from mezzo.records import AS_IS, Reason

if TYPE_CHECKING:
    from mezzo.commands.check.runs import Check, CheckSettings
    from mezzo.launch.several.resuming import Finished
    from mezzo.launch.several.side_by_side import Engine
    from mezzo.policy import Policy
    from mezzo.records import CheckRecord

HELP = HelpPage(
    group="start",
    says="say which precision to train in: one answer",
    example="mezzo check --budget 5m train.py --epochs 3",
    shown=("--budget", "--gpu", "--policies", "--metric", "--write-patch", "--out", "--resume", "-m"),
)


_DEFAULT_SEEDS = 3
_TAIL = 12
"""Lines of a failed script's output that are shown."""


def check(
    script: Script,
    budget: options.Budget = "10m",
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            callback=values.gpu,
            help="The GPU to answer for, such as a100-80gb. [default: this machine's device]",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        options.policies_option(
            f"Policies to try in addition to fp32, separated by commas. Presets: {options.PRESETS_HELP} "
            "[default: those that the device offers]"
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Runs per policy, each with its own seed. [default: 3, fewer if time is short]"
        ),
    ] = None,
    write_patch: Annotated[
        bool, typer.Option("--write-patch", help="Also write the change to the script as a diff, after trying it.")
    ] = False,
    metric: options.Metric = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Find out which precision a training script should use, what that gains, and what to type next.

    Runs the script, unedited, in FP32 and in the lower precisions that the device (or --gpu) offers, finds the cause where one fails,
    repairs what can be repaired, and ends with one answer.

    A script that takes too long for the budget is stopped after its first steps, the same number in every run. Ctrl-C keeps what is
    finished: the same command with the same --out continues from there. Exit code 0: there is an answer (staying in FP32 is
    one); 1: it is undecided, or FP32 itself does not train; a script that fails by itself keeps its own exit code.
    """
    from mezzo.gpus import gpu_named

    options.check_metric(metric)
    named = {} if policies is None else _named(policies)
    opts = CheckOptions(
        script=script,
        budget=Budget(seconds_of(budget, option="--budget", example="10m")),
        gpu=None if gpu is None else gpu_named(gpu),
        policies=None if policies is None else list(named),
        seeds=seeds or _DEFAULT_SEEDS,
        metric=metric,
    )
    opts.script.check(*named.values())
    engine = engine_of(jobs, on)
    if write_patch and on is not None:
        raise UsageError(
            f"--write-patch with --on {on}; allowed: one of them, because a patch is tried on this machine",
            hint="leave out --write-patch, and type mezzo check --write-patch on a machine like the workers",
        )
    folder = opts.script.folder("check")
    with stoppable() as stop, shown() as progress:
        opts.budget.console = progress.console
        try:
            with engine.opened(folder):
                record, code = _checked(opts, folder, engine)
        except Stopped as stopped:
            script.say_stopped(f"stopped by {stop.name}; what is finished is kept", folder)
            raise typer.Exit(stopped.exit_code) from None
        if write_patch:
            left_s = opts.budget.seconds - opts.budget.spent_s
            from mezzo.commands.check.patches import with_patch  # NumPy

            record = with_patch(opts.script, record, folder, left_s=left_s, say=opts.budget.say)
        opts.script.finish(record, folder)
    raise typer.Exit(stop.exit_code or code)


def _named(policies: str) -> dict[str, Policy | None]:
    """Return the policies of ``--policies`` by the text that records have for them.

    Raises:
        PolicyError: one is unknown, or there is none other than FP32.
    """
    from mezzo.launch.request import policy_text

    named = [values.parse_policy(text) for text in values.names_in(policies)]
    by_text = {policy_text(policy): policy for policy in named}
    if not set(by_text) - {"fp32"}:
        raise PolicyError(
            f"--policies {policies!r} names nothing to compare with fp32",
            hint=f"type: {with_value('--policies', 'bf16,fp16')}",
        )
    return by_text


def _checked(opts: CheckOptions, folder: Path, engine: Engine) -> tuple[CheckRecord, int]:
    """Run what is needed; return the record and the exit code.

    Raises:
        Stopped: a signal has stopped the command.
    """
    budget = opts.budget
    budget.say(f"{Path(opts.script.target).name}: finding out what {name_of(engine)} can do")
    from mezzo.commands.check.runs import Check
    from mezzo.gpus import find_gpu
    from mezzo.launch.runner import import_ahead
    from mezzo.launch.several.waves import Waves

    import_ahead(opts.script.request(None, folder=folder))
    machine = machine_of(engine, folder)
    if opts.gpu is not None and find_gpu(machine.device.name) is opts.gpu:
        opts = replace(opts, gpu=None)  # the machine has it: measuring is better than bounding
    offers = _offers(opts, machine)
    _say_offers(budget, opts, machine, offers)
    settings = _settings(opts, offers, budget_s=time_for_runs_s(opts, machine))
    finished = _finished(opts, folder)
    waves = Waves(engine, finished.identity)
    checking = Check(settings=settings, folder=folder, finished=finished, waves=waves, say=budget.say, keep=write)
    checking.run()
    record = check_record(opts, checking, offers, machine, engine)
    finished.forget()
    first = checking.known.runs[0] if checking.known.runs else None
    if first is not None and first.error is not None:
        _show_output(checking)
    if first is not None and first.exit_code and not checking.too_slow:
        return record, first.exit_code
    return record, 0 if record.answer.decision in ("use", "stay") else 1


# --- before the first run ------------------------------------------------------------------------------------------------------


def _offers(opts: CheckOptions, machine: Machine) -> list[Offered]:
    from mezzo.launch.frameworks import own_sources

    if opts.policies is None:
        sources = own_sources(opts.script.target, kind=opts.script.kind)
        return offered(machine.device, target=None if opts.gpu is None else opts.gpu.device, own_amp=own_amp(sources))
    why = "--policies names it"
    return [THE_BASELINE, *(Offered(text, True, why) for text in opts.policies if text != BASELINE)]


def _say_offers(budget: Budget, opts: CheckOptions, machine: Machine, offers: list[Offered]) -> None:
    here = machine.device
    budget.say(f"{machine.name} trains on {here.kind}, {here.name}; {formats_of(here)}")
    if opts.gpu is not None:
        budget.say(
            f"the answer is for {opts.gpu.label}; gains from hardware that {machine.name} lacks are bounded, not measured"
        )
    for offer in offers:
        budget.say(f"{offer.note.what} {offer.note.value}: {offer.reason}")


def _settings(opts: CheckOptions, offers: list[Offered], *, budget_s: float) -> CheckSettings:
    from mezzo.commands.check.runs import CheckSettings

    script = opts.script
    return CheckSettings(
        policies=tuple(tried(offers)),
        seeds=opts.seeds,
        budget_s=budget_s,
        metric=opts.metric,
        make_request=script.request,
        arguments=tuple(script.arguments or ()),
        framework=script.framework,
    )


def _finished(opts: CheckOptions, folder: Path) -> Finished:
    """Return what an interrupted check of the same script left in the folder."""
    finished = finished_before(opts.script, folder, "check", say=opts.budget.say, metric=opts.metric or "")
    if len(finished):
        opts.budget.say(f"{len(finished)} finished parts of the interrupted check are reused")
    finished.write()
    return finished


# --- after the last run --------------------------------------------------------------------------------------------------------


def _show_output(checking: Check) -> None:
    """Print the end of what a failed script printed."""
    output = Path(checking.stages[0].folder) / "output.log"
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_TAIL:]:
        print(f"  | {line}", file=sys.stderr)


# --- The policies worth trying on a device, and why each is tried or left out ---------------------------------------------------

BASELINE = FP32.name


class Offered(NamedTuple):
    """A policy that a check considers."""

    policy: str
    tried: bool
    reason: str

    @property
    def note(self) -> Reason:
        """The choice in words."""
        return Reason(what=self.policy, value="tried" if self.tried else "left out", reason=self.reason)


THE_BASELINE = Offered(BASELINE, True, "the baseline: all others are compared with it")


def offered(here: Device, *, target: Device | None = None, own_amp: str = "") -> list[Offered]:
    """Return the policies to consider, the baseline first.

    Args:
        here: the device that the script runs on.
        target: the device that the answer is for, if different.
        own_amp: the call or argument by which the script asks for mixed precision; empty if it does not.
    """
    target = target or here
    fp8 = target.support(E4M3)
    offers = [THE_BASELINE, _tf32(here, target), *_sixteen_bits(here, target)]
    offers.append(Offered("fp8", fp8.level == "native", f"{target.name}: {fp8.reason}"))
    if own_amp:
        why = f"the script asks for mixed precision itself ({own_amp}), which the other policies replace"
        offers.append(Offered(AS_IS, True, why))
    return offers


def tried(offers: Sequence[Offered]) -> list[str]:
    """Return the policies to run, the baseline first."""
    return [offer.policy for offer in offers if offer.tried]


def _tf32(here: Device, target: Device) -> Offered:
    target_support, here_support = target.support(TF32), here.support(TF32)
    if target_support.level != "native":
        return Offered(TF32.name, False, f"{target.name}: {target_support.reason}")
    if here_support.level != "native":
        return Offered(TF32.name, False, f"{target.name} has it, but it cannot be tried here: {here_support.reason}")
    return Offered(TF32.name, True, f"{target.name}: {target_support.reason}")


def _sixteen_bits(here: Device, target: Device) -> list[Offered]:
    """Offer both 16-bit formats, unless an accelerator has units for only one; a CPU emulates a format it has no units for."""
    formats = (BF16, FP16)
    native = [fmt for fmt in formats if target.support(fmt).level == "native"]
    offers = []
    for fmt in formats:
        left_out = len(native) == 1 and target.kind != "cpu" and fmt not in native
        reason = f"{target.name}: {target.support(fmt).reason}"
        if here.support(fmt).level != "native":
            reason += "; emulated here, which shows what it does to training, not how fast it is"
        offers.append(Offered(fmt.name, not left_out, reason))
    return offers


# --- Whether a script switches mixed precision on by itself, read from its source without running it ----------------------------

_CALLS = ("autocast", "GradScaler")
_PRECISION = ("precision", "mixed_precision")
_OFF = ("no", "none", "false", "32", "32-true", "64", "64-true", "fp32", "float32", "highest", "high", "medium")
_FLAGS = ("fp16", "bf16")


def own_amp(sources: Iterable[str]) -> str:
    """Return the call or argument by which files ask for mixed precision: ``GradScaler``, ``precision='16-mixed'``; empty if none does."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        if found := next(_requests(tree), ""):
            return found
    return ""


def _requests(tree: ast.AST) -> Iterator[str]:
    if any(_is_session(node) for node in ast.walk(tree)):  # named before the autocast() that it contains
        yield "mezzo.Session"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in _CALLS and not _is(keywords.get("enabled"), False):
            yield name
        for option in _PRECISION:
            value = keywords.get(option)
            if isinstance(value, ast.Constant) and _lowers(value.value):
                yield f"{option}={value.value!r}"
        yield from (f"{flag}=True" for flag in _FLAGS if _is(keywords.get(flag), True))


def _is_session(node: ast.AST) -> bool:
    """Return whether ``node`` is ``mezzo.Session``, or its import."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "mezzo" and any(name.name == "Session" for name in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != "Session":
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "mezzo"


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _lowers(value: object) -> bool:
    return (isinstance(value, str) and value.lower() not in _OFF and any(c in value for c in "168")) or value == 16
