"""``mezzo fallback``: the modules of a script that must stay in FP32, or products in BF16, verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, results
from mezzo.cli.options import Jobs, On, engine_of
from mezzo.cli.progress import shown
from mezzo.cli.script import Script, finished_before
from mezzo.cli.shown_help import HelpPage

if TYPE_CHECKING:
    from mezzo.records import FallbackRecord, RunRecord

HELP = HelpPage(
    group="understand",
    says="find the modules that have to stay in FP32",
    example="mezzo fallback --policy fp16 train.py",
    shown=("--policy", "--per-gemm", "--tolerance", "--fresh", "--out", "--resume", "-m"),
)


FallbackPolicy: TypeAlias = Annotated[
    str, options.policy_option("Policy to judge. The modules that it keeps in FP32 stay in FP32.", as_is=False)
]
FallbackTolerance: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        min=1e-9,
        max=1.0,
        help="Largest relative error accepted in a parameter's gradient. [default: what rounding explains, and at least "
        "0.02 for fp16, 0.16 for bf16, 0.5 for fp8 and blocks]",
    ),
]
PerGemm: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--per-gemm",
        help="Find single products (forward, dgrad, wgrad) of layers that have to stay in BF16, in place of modules; for policies in "
        "blocks: mxfp8, mxfp4, nvfp4, fp8-block.",
    ),
]
FallbackFresh: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=0, max=100, help="Number of further batches to check the set on.")
]


def fallback(
    script: Script,
    policy: FallbackPolicy = "fp16",
    tolerance: FallbackTolerance = None,
    fresh: FallbackFresh = 2,
    per_gemm: PerGemm = False,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Find the modules that must stay in FP32 under a policy, and write a policy file that keeps them there.

    The script runs unedited, about ten times for a few steps: in FP32, then under the policy with one set of modules after
    another kept in FP32. With --per-gemm these are sets of products in BF16. Pass the policy file to --policy of the other
    commands, or to mezzo.Session.

    With --jobs or --on, runs that the search will probably need next start at the same time; the result is the same. --resume FOLDER
    continues a search that was stopped.
    """
    from mezzo.commands.fallback.runs import fallback_of_script
    from mezzo.policy import Policy
    from mezzo.studies.loop import Study

    judged = Policy.of(policy)
    if per_gemm:
        script.check_supported("--per-gemm")
    script.check(judged)
    engine = engine_of(jobs, on)
    folder = script.folder("fallback", leaves=("policy.toml", "runs"))
    finished = finished_before(script, folder, "search", say=results.note)
    finished.begin({}, restart=script.resume is None)
    request, study = script.request(judged, folder=folder), Study(engine, finished)
    with stoppable() as stop:
        record: FallbackRecord | RunRecord
        try:
            with shown(), engine.opened(folder):
                record = fallback_of_script(
                    request,
                    folder=folder,
                    study=study,
                    resume=script.resume is not None,
                    tolerance=tolerance,
                    fresh=fresh,
                    per_gemm=per_gemm,
                    note=results.note,
                )
            finished.end()
        except Stopped as stopped:
            script.say_stopped(f"{stopped}; the records of its runs are", folder)
            if stopped.record is None:
                raise typer.Exit(stopped.exit_code) from None
            record = stopped.record
        if record.kind == "fallback":
            record = record.model_copy(update={"policy_typed": options.typed_name(policy, judged)})
        if record.kind == "fallback" and record.helps:
            path = folder / "policy.toml"
            path.write_text(Policy.parse(record.suggested).to_toml(), encoding="utf-8")
            record = record.model_copy(update={"policy_file": str(path)})
        script.finish(record, folder)
    raise typer.Exit(stop.exit_code)
