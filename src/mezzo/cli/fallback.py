"""``mezzo fallback``: the modules of a script that must stay in FP32, verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.progress import shown
from mezzo.cli.script import Script
from mezzo.launch.process.command_signals import Stopped, stoppable

if TYPE_CHECKING:
    from mezzo.records import FallbackRecord, RunRecord


def fallback(
    target: options.Target,
    arguments: options.Arguments = None,
    policy: Annotated[
        str, options.policy_option("Policy to judge. The modules that it keeps in FP32 stay in FP32.")
    ] = "fp16",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            max=1.0,
            help="Largest relative error accepted in a parameter's gradient. [default: fp16 0.02, bf16 0.16, fp8 0.5]",
        ),
    ] = None,
    fresh: Annotated[int, typer.Option(min=0, max=100, help="Number of further batches to check the set on.")] = 2,
    as_module: options.AsModule = False,
    out: options.Out = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
) -> None:
    """Find the modules that must stay in FP32 under a policy, and write a policy file that keeps them there.

    The script runs unedited, some ten times for a few steps: in FP32, then under the policy with one set of modules after
    another kept in FP32. Pass the policy file to --policy of the other commands, or to mezzo.Session.
    """
    from mezzo.launch.runner import several_runs
    from mezzo.launch.several.fallback import fallback_of_script
    from mezzo.policy import Policy

    script = Script(target=target, arguments=arguments, as_module=as_module, out=out, log_to=log_to, as_json=as_json)
    judged = Policy.of(policy)
    script.check(judged)
    folder = script.folder("fallback", leaves=("policy.toml", "runs"))
    request = script.request(judged, folder=folder)
    with stoppable() as stop:
        record: FallbackRecord | RunRecord
        try:
            with several_runs(), shown():
                record = fallback_of_script(request, folder=folder, tolerance=tolerance, fresh=fresh, note=results.note)
        except Stopped as stopped:
            if stopped.record is None:
                raise
            results.note(f"{stopped}; the records of its runs are in {folder / 'runs'}")
            record = stopped.record
        if record.kind == "fallback":
            record = record.model_copy(update={"policy_typed": options.typed_name(policy, judged)})
        if record.kind == "fallback" and (record.kept or record.operations):
            path = folder / "policy.toml"
            path.write_text(Policy.parse(record.suggested).to_toml(), encoding="utf-8")
            record = record.model_copy(update={"policy_file": str(path)})
        script.finish(record, folder)
    raise typer.Exit(stop.exit_code)
