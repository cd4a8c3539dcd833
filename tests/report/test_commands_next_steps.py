"""The commands that each record suggests: exact for each kind and verdict, and all of them accepted by the command line."""

from __future__ import annotations

import html
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

import record_builders as build
from mezzo.cli.parser import app
from mezzo.policy import Policy
from mezzo.records import (
    AnyRecord,
    AuditRecord,
    Bottleneck,
    DiagnoseRecord,
    Effective,
    FallbackRecord,
    Finding,
    Pass,
    RangesRecord,
    RunRecord,
    ScaleWindow,
    SnapshotsTaken,
    Steps,
    Verdict,
)
from mezzo.report import terminal
from mezzo.report.commands import MOST
from mezzo.report.html import render_html
from mezzo.report.pages import page_of

NAN = float("nan")
PLAIN = ("train.py", "--epochs", "3")
FINDING = Finding(code="A201", title="t", modules=[], detail="", gain="", fix="do it", share=0.5)


def run(command: str = "run", policy: str = "fp16", *, words: Sequence[str] = PLAIN, **fields: object) -> RunRecord:
    script = next(word for word in words if word not in ("-m", "--"))
    line = ["mezzo", command, "--out", "r", *words]
    known: dict[str, Any] = {"command": line, "script": script, "num_steps": 60, "findings": []}
    return build.run_record(policy, **{**known, **fields})  # type: ignore[arg-type]


def compare(
    *rows: tuple[str, Verdict, dict[str, object]], words: Sequence[str] = PLAIN, seeds: int = 3, **fields: object
) -> AnyRecord:
    made = [build.row("fp32", "baseline"), *(build.row(policy, verdict, **more) for policy, verdict, more in rows)]
    runs = [run("compare", row.policy, words=words, seed=seed) for seed in range(seeds) for row in made]
    line = runs[0].command
    return build.compare_record(command=line, rows=made, runs=runs, **fields)


def diagnose(
    verdict: str,
    *,
    policy: str = "fp16",
    words: Sequence[str] = PLAIN,
    run_fields: dict[str, object] | None = None,
    **fields: object,
) -> DiagnoseRecord:
    own = run("diagnose", policy, words=words, **(run_fields or {}))
    return DiagnoseRecord.model_validate({"run": own, "verdict": verdict, **fields})


def ranges(window: dict[str, object], *, policy: str = "fp16", **fields: object) -> RangesRecord:
    form = "fp16" if "fp16" in policy else "bf16"
    one = ScaleWindow.model_validate({"format": form, "reason": "", **window})
    return RangesRecord.model_validate(
        {
            "run": run("ranges", "fp32"),
            "policy": policy,
            "format": form,
            "first_scale": 0,
            "little": 0.01,
            "windows": [one],
            **fields,
        }
    )


def fallback(verdict: str, **fields: object) -> FallbackRecord:
    return FallbackRecord.model_validate(
        {
            "run": run("fallback", "fp32"),
            "policy": "fp16",
            "tolerance": 0.02,
            "verdict": verdict,
            "reason": "",
            **fields,
        }
    )


def nan_steps() -> Steps:
    return Steps(loss=[1.0] * 39 + [NAN] * 20, skipped=[False] * 59, time_ms=[1.0] * 59)


def diverged() -> AnyRecord:
    record = compare(("fp16", "diverged", {}))
    runs = [r.model_copy(update={"steps": nan_steps()}) if r.policy == "fp16" else r for r in record.runs]  # type: ignore[union-attr]
    return record.model_copy(update={"runs": runs})


def idle() -> AnyRecord:
    record = compare(("fp8", "undecided", {}), seeds=1)
    runs = [r.model_copy(update={"effective": Effective(flops_by_format={"fp32": 1})}) for r in record.runs]  # type: ignore[union-attr]
    return record.model_copy(update={"runs": runs})


TAIL = "train.py --epochs 3"
CASES: dict[str, tuple[AnyRecord, list[tuple[str, str]]]] = {
    "run": (
        run(policy="bf16"),
        [
            ("see whether bf16 trains like fp32", f"mezzo compare --policies fp32,bf16 {TAIL}"),
            ("see which operation ran in which format", f"mezzo audit --policy bf16 {TAIL}"),
        ],
    ),
    "run fp32": (
        run(policy="fp32"),
        [("see whether 16 bits train as well, and what they save", f"mezzo compare --policies fp32,bf16,fp16 {TAIL}")],
    ),
    "run diverged": (
        run(policy="fp16-pure"),
        [
            ("the loss is not finite; find where that begins", f"mezzo diagnose --policy fp16-pure {TAIL}"),
            ("see which policies keep it finite", f"mezzo compare --policies fp32,fp16-pure {TAIL}"),
        ],
    ),
    "run failed": (
        run(error="ValueError: no", exit_code=1),
        [("see whether the script also fails without Mezzo", f"python {TAIL}")],
    ),
    "run refused by an operation": (
        run(policy="bf16", error="RuntimeError: Unsupported dtype BFloat16", exit_code=1),
        [
            (
                "an operation does not accept the format of bf16; find the modules that must stay in FP32",
                f"mezzo fallback --policy bf16 {TAIL}",
            )
        ],
    ),
    "run refused a number": (
        run(
            policy="fp16",
            error="RuntimeError: value cannot be converted to type c10::Half without overflow",
            exit_code=1,
        ),
        [
            (
                "a number in the script is beyond the range of fp16; find its line",
                f"mezzo diagnose --policy fp16 {TAIL}",
            )
        ],
    ),
    "run refused in fp32": (
        run(policy="fp32", error="RuntimeError: Unsupported dtype BFloat16", exit_code=1),
        [("see whether the script also fails without Mezzo", f"python {TAIL}")],
    ),
    "run interrupted": (run(error="ended by SIGINT", exit_code=130), []),
    "run not resumed": (run(error="there is no snapshot in 'runs/mine/snapshots'", exit_code=9), []),
    "run stopped after a snapshot": (
        run(
            error="stopped by SIGTERM",
            exit_code=143,
            snapshots=SnapshotsTaken(folder="/home/me/runs/mine/snapshots", every_s=300, saved=2),
        ),
        [
            (
                "continue from its last snapshot",
                "mezzo run --policy fp16 --snapshot 300s --resume /home/me/runs/mine train.py --epochs 3",
            )
        ],
    ),
    "run at its floor": (
        run(error="floor", exit_code=5),
        [("find the first value that is not finite", f"mezzo diagnose --policy fp16 {TAIL}")],
    ),
    "run unsupported": (
        run(error="no", exit_code=3),
        [("see which formats each device of this machine computes in", "mezzo doctor")],
    ),
    "run with an operation that CUDA lacks": (
        run(error="NoKernelError: Unsupported dtype BFloat16", exit_code=3),
        [
            (
                "an operation does not accept the format of fp16; find the modules that must stay in FP32",
                f"mezzo fallback --policy fp16 {TAIL}",
            )
        ],
    ),
    **{
        f"run whose script ends itself with code {code}": (
            run(exit_code=code),
            [("see whether the script also fails without Mezzo", f"python {TAIL}")],
        )
        for code in (3, 5, 6, 7, 9, 10)  # Mezzo's own errors have them, too
    },
    "run in keras": (
        run(policy="bf16", framework="keras 3.15.1 on tensorflow 2.21.0"),
        [
            ("see whether bf16 trains like fp32", f"mezzo compare --policies fp32,bf16 {TAIL}"),
            ("see which operation ran in which format", f"mezzo audit --policy bf16 {TAIL}"),
        ],
    ),
    "watched in its own fp32": (
        run("watch", policy="as-is", effective=Effective(flops_by_format={"fp32": 10}, counted_on_step=2)),
        [("see whether 16 bits train as well, and what they save", f"mezzo compare --policies fp32,bf16,fp16 {TAIL}")],
    ),
    "watched, and held back by its input": (
        run(
            "watch",
            policy="as-is",
            watched=True,
            bottleneck=Bottleneck(limit="input", sentence="61%", change=["A", "B"]),
        ),
        [("change this, then see what holds it back: A", f"mezzo watch {TAIL}")],
    ),
    "watched, and held back by memory bandwidth": (
        run(
            "watch",
            policy="as-is",
            watched=True,
            bottleneck=Bottleneck(limit="bandwidth", sentence="61%", change=["torch.compile"]),
            effective=Effective(flops_by_format={"fp32": 10}, counted_on_step=2),
        ),
        [("see whether 16 bits train as well, and what they save", f"mezzo compare --policies fp32,bf16,fp16 {TAIL}")],
    ),
    "run with findings": (
        run(policy="as-is", findings=[FINDING]),
        [("after fixing A201, see whether anything is left", f"mezzo run {TAIL}")],
    ),
    "equivalent": (
        compare(
            ("bf16", "equivalent", {"emulated": True, "memory_ratio": 0.7}),
            ("fp16", "equivalent", {"memory_ratio": 0.6}),
        ),
        [("train with fp16", f"mezzo run --policy fp16 {TAIL}")],
    ),
    "equivalent, but slower": (
        compare(("bf16", "equivalent", {"speedup": 0.6, "speedup_low": 0.5, "speedup_high": 0.8, "memory_ratio": 0.6})),
        [("train with bf16, which is slower here, for its memory", f"mezzo run --policy bf16 {TAIL}")],
    ),
    "equivalent, emulated world": (
        compare(("bf16:reduce=bf16:world=384:reduce_order=tree", "equivalent", {"emulated": True})),
        [("train with bf16:reduce=bf16 in several processes", f"mezzo run --policy bf16:reduce=bf16 {TAIL}")],
    ),
    "diverged": (
        diverged(),
        [("fp16 diverged at step 40; find the first bad value", f"mezzo diagnose --policy fp16 {TAIL}")],
    ),
    "everything": (
        compare(
            ("bf16", "equivalent", {}),
            ("fp16", "stopped_learning", {}),
            ("fp8", "different", {}),
            ("fp16-pure", "failed", {}),
        ),
        [
            ("train with bf16", f"mezzo run --policy bf16 {TAIL}"),
            ("fp16 stopped learning; find out why", f"mezzo diagnose --policy fp16 {TAIL}"),
            (
                "fp8 trains to a different result; find the modules to keep in FP32",
                f"mezzo fallback --policy fp8 {TAIL}",
            ),
        ],
    ),
    "stopped learning in FP32's range": (
        compare(("bf16", "stopped_learning", {})),
        [
            (
                "bf16 stopped learning; find the modules or operations that lose digits",
                f"mezzo fallback --policy bf16 {TAIL}",
            )
        ],
    ),
    "failed": (
        compare(("fp16", "failed", {})),
        [("fp16 failed; see its output", f"mezzo run --policy fp16 {TAIL}")],
    ),
    "baseline failed": (
        compare(("fp16", "failed", {})).model_copy(
            update={"rows": [build.row("fp32", "failed", num_failed=3), build.row("fp16", "failed")]}
        ),
        [("no run of the baseline succeeded; see whether the script succeeds without Mezzo", f"python {TAIL}")],
    ),
    "undecided": (
        compare(
            ("bf16", "undecided", {"seeds_needed": 9}),
            ("fp16", "undecided", {"seeds_needed": 7}),
            ("fp8", "undecided", {}),
        ),
        [
            (
                "bf16 and fp16 are undecided; 9 seeds would decide in about 6 min",
                f"mezzo compare --policies fp32,bf16,fp16 --seeds 9 {TAIL}",
            )
        ],
    ),
    "undecided with one seed": (
        compare(("bf16", "undecided", {}), seeds=1),
        [
            (
                "bf16 is undecided; 3 seeds may decide in about 1 min",
                f"mezzo compare --policies fp32,bf16 --seeds 3 {TAIL}",
            )
        ],
    ),
    "undecided because nothing changed": (
        idle(),
        [("fp8 changed nothing; see why", f"mezzo audit --policy fp8 {TAIL}")],
    ),
    "names as typed": (
        compare(("fp16", "different", {"policy_typed": "O1"})),
        [("O1 trains to a different result; find the modules to keep in FP32", f"mezzo fallback --policy O1 {TAIL}")],
    ),
    "diagnosis with a tried fix": (
        diagnose(
            "range_overflow",
            located=True,
            fix="keep b in FP32",
            fix_policy="fp16:fp32_modules=b.*",
            fix_tried=True,
        ),
        [
            ("train with the fix", f"mezzo run --policy 'fp16:fp32_modules=b.*' {TAIL}"),
            ("see whether it trains like fp32", f"mezzo compare --policies 'fp32,fp16:fp32_modules=b.*' {TAIL}"),
        ],
    ),
    "diagnosis with a change": (
        diagnose("invalid_operation", located=True, fix="keep it above 0", fix_line="y = torch.sqrt(x + 1e-12)"),
        [("after changing the script, see whether anything is left", f"mezzo diagnose {TAIL}")],
    ),
    "diagnosis of a cast that no set of modules reaches": (
        diagnose(
            "range_overflow",
            located=True,
            fix="none of these",
            own_cast="fp16",
            passes=[Pass(policy="bf16", reason="to try: bf16", tries_fix=True)],
        ),
        [("after changing the script, see whether anything is left", f"mezzo diagnose {TAIL}")],
    ),
    "diagnosis that needs a set": (
        diagnose(
            "range_overflow",
            located=True,
            fix="none of these",
            passes=[Pass(policy="bf16", reason="to try: bf16", tries_fix=True)],
        ),
        [
            (
                "no single fix is enough; search for a set of modules to keep in FP32",
                f"mezzo fallback --policy fp16 {TAIL}",
            )
        ],
    ),
    "healthy": (
        diagnose("healthy"),
        [
            ("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}"),
            (
                "if it does not, find the modules or operations that lose digits",
                f"mezzo fallback --policy fp16 {TAIL}",
            ),
            (
                "if the loss is NaN in the script's own precision, diagnose that",
                f"mezzo diagnose --policy as-is {TAIL}",
            ),
        ],
    ),
    "healthy, with a misuse of the script's own scaler": (
        diagnose("healthy", policy="as-is", run_fields={"findings": [FINDING]}),
        [
            (f"after fixing {FINDING.code}, see whether anything is left", f"mezzo diagnose {TAIL}"),
            ("see whether as-is trains like fp32", f"mezzo compare --policies fp32,as-is {TAIL}"),
        ],
    ),
    "healthy as it is": (
        diagnose("healthy", policy="as-is"),
        [("see whether as-is trains like fp32", f"mezzo compare --policies fp32,as-is {TAIL}")],
    ),
    "not located": (
        diagnose("range_overflow"),
        [("after setting the script's seeds, so that the step can be inspected", f"mezzo diagnose {TAIL}")],
    ),
    "unfinished": (
        diagnose("unfinished", run_fields={"error": "ValueError", "exit_code": 1}),
        [("see whether the script also fails without Mezzo", f"python {TAIL}")],
    ),
    "ranges": (
        ranges({"lowest": 3, "highest": 14, "suggested": 12}),
        [
            ("train with a loss scale that fits", f"mezzo run --policy fp16:init_scale=4096 {TAIL}"),
            ("see whether it trains like fp32", f"mezzo compare --policies fp32,fp16:init_scale=4096 {TAIL}"),
        ],
    ),
    "ranges that fit": (
        ranges({"lowest": 3, "highest": 20, "suggested": 16}, policy="fp16", policy_typed="16-mixed"),
        [("see whether 16-mixed trains like fp32", f"mezzo compare --policies fp32,16-mixed {TAIL}")],
    ),
    "ranges below 1, of a policy without a scale": (
        ranges({"lowest": -3, "highest": -1, "suggested": -2}, policy="fp16-pure:fp32_modules=a"),
        [
            (
                "train with a loss scale that fits",
                f"mezzo run --policy fp16-pure:fp32_modules=a:loss_scale=dynamic:init_scale=0.25 {TAIL}",
            ),
            (
                "see whether it trains like fp32",
                f"mezzo compare --policies fp32,fp16-pure:fp32_modules=a:loss_scale=dynamic:init_scale=0.25 {TAIL}",
            ),
        ],
    ),
    "empty window": (
        ranges({"lowest": 9, "highest": 3}),
        [
            ("find the modules to keep in FP32", f"mezzo fallback --policy fp16 {TAIL}"),
            ("see whether bf16 trains like fp32", f"mezzo compare --policies fp32,bf16 {TAIL}"),
        ],
    ),
    "audit": (
        AuditRecord(run=run("audit", "fp16"), steps=[3], findings=[FINDING], flops_by_phase={"forward": {"fp16": 1}}),
        [
            ("after fixing A201, see what is left", f"mezzo audit {TAIL}"),
            ("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}"),
        ],
    ),
    "audit of a step without products": (
        AuditRecord(run=run("audit", "fp16"), steps=[3]),
        [
            (
                "that step had no matrix product; if optimizers take turns, audit a whole round",
                f"mezzo audit --at 3-6 {TAIL}",
            ),
            ("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}"),
        ],
    ),
    "audit of several steps without products": (
        AuditRecord(run=run("audit", "fp16"), steps=[3, 4, 5, 6]),
        [("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}")],
    ),
    "audit in fp32": (
        AuditRecord(
            run=run("audit", "as-is"),
            steps=[3],
            flops_by_phase={"forward": {"fp32": 1}},
            findings=[FINDING.model_copy(update={"code": "A101"})],
        ),
        [("see whether 16 bits train as well, and what they save", f"mezzo compare --policies fp32,bf16,fp16 {TAIL}")],
    ),
    "fallback": (
        fallback("found", kept=["b"], suggested="fp16:fp32_modules=b", policy_file="runs/my x/policy.toml"),
        [
            ("train with the modules in FP32", f"mezzo run --policy 'runs/my x/policy.toml' {TAIL}"),
            ("see whether it trains like fp32", f"mezzo compare --policies 'fp32,runs/my x/policy.toml' {TAIL}"),
        ],
    ),
    "fallback in a folder with a comma": (
        fallback("found", kept=["b"], suggested="fp16:fp32_modules=b", policy_file="a,b/policy.toml"),
        [
            ("train with the modules in FP32", f"mezzo run --policy fp16:fp32_modules=b {TAIL}"),
            ("see whether it trains like fp32", f"mezzo compare --policies fp32,fp16:fp32_modules=b {TAIL}"),
        ],
    ),
    "elsewhere": (
        fallback("elsewhere"),
        [
            ("find the operation that loses values, and its line", f"mezzo diagnose --policy fp16 {TAIL}"),
            ("if bf16 passes, the range is the cause, and bf16 the fix", f"mezzo fallback --policy bf16 {TAIL}"),
            (
                "after moving that operation into a module of its own: fp32_modules names modules only",
                f"mezzo fallback --policy fp16 {TAIL}",
            ),
        ],
    ),
    "fp32 fails": (
        fallback("fp32 fails"),
        [("find the operation that is not finite in FP32", f"mezzo diagnose --policy fp32 {TAIL}")],
    ),
    "not repeatable": (
        fallback("not repeatable"),
        [
            (
                "after setting the script's seeds, so that it reads the same batches in the same order at each start",
                f"mezzo fallback --policy fp16 {TAIL}",
            )
        ],
    ),
    "nothing changed": (
        fallback("not needed", error_before=0.0),
        [("fp16 changed nothing; see why", f"mezzo audit --policy fp16 {TAIL}")],
    ),
    "not needed": (
        fallback("not needed", error_before=0.001),
        [("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}")],
    ),
    "undecided gradients": (
        fallback("undecided", error_before=None),
        [("see whether fp16 trains like fp32", f"mezzo compare --policies fp32,fp16 {TAIL}")],
    ),
    "does not pay, bf16 passes": (
        fallback("does not pay", kept=["body"], suggested="fp16:fp32_modules=body", instead="bf16"),
        [
            (
                "bf16 passes on the same batches; see whether it trains like fp32",
                f"mezzo compare --policies fp32,bf16 {TAIL}",
            )
        ],
    ),
    "does not pay at all": (
        fallback("does not pay", kept=["body"], suggested="fp16:fp32_modules=body", instead="fp32"),
        [
            ("stay in fp32", f"mezzo run --policy fp32 {TAIL}"),
            ("see whether fp16 trains like it all the same", f"mezzo compare --policies fp32,fp16 {TAIL}"),
        ],
    ),
    "doctor": (
        build.doctor_record(),
        [
            (
                "get one answer for your script; replace train.py with its name",
                "mezzo check train.py",
            )
        ],
    ),
    "a function": (
        fallback(
            "elsewhere",
            run=run(policy="fp32").model_copy(update={"command": ["python", "x.py"], "script": "main.<locals>.train"}),
        ),
        [
            ("find the operation that loses values, and its line", 'mezzo.diagnose(train, policy="fp16")'),
            ("if bf16 passes, the range is the cause, and bf16 the fix", 'mezzo.fallback(train, policy="bf16")'),
            (
                "after moving that operation into a module of its own: fp32_modules names modules only",
                'mezzo.fallback(train, policy="fp16")',
            ),
        ],
    ),
    "runs that share files": (
        compare(("fp16", "undecided", {}), shared_files=[{"path": "x", "written_by": "a", "read_by": "b"}]),
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_next_steps(name: str) -> None:
    record, expected = CASES[name]
    assert [(step.why, step.command) for step in page_of(record).steps] == expected


HOSTILE: list[tuple[str, ...]] = [
    ("my train.py", "a b", "it's", '"quoted"', "$HOME `id` $(id)", "; rm -rf /", "*", "", "\\"),
    ("--", "-train.py", "--policy", "x", "-h", "--help"),
    ("-m", "pkg.train", "-m", "--", "--json"),
    ("train.py", "--output", "out/{run}", "--seeds", "many", "--metric"),
    ("train.py", *["word"] * 500),
]


def parsed(command: str) -> tuple[str, Any]:
    """Return the command's name and what the parser makes of its words."""
    words = shlex.split(command)
    name, rest = words[words.index("mezzo") + 1], words[words.index("mezzo") + 2 :]
    return name, get_command(app).commands[name].make_context(name, rest).params  # type: ignore[attr-defined]


def is_accepted(command: str, words: Sequence[str] = PLAIN) -> None:
    if shlex.split(command)[0] == "python":
        return
    name, params = parsed(command)
    if name == "doctor":
        return
    for policy in (params.get("policies") or params.get("policy") or "fp32").split(","):
        if policy != "as-is" and not policy.endswith(".toml"):
            Policy.parse(policy)
    target, *own = [word for word in words if word not in ("-m", "--")][:1] + list(
        words[words.index(params["target"]) + 1 :]
    )
    assert params["target"] == target
    assert params["as_module"] == (words[0] == "-m")
    made = [word.replace("{run}", "") for word in own]
    assert len(params["arguments"] or []) == len(own)
    assert [
        word
        for word, before in zip(params["arguments"] or [], made, strict=True)
        if before == "" or "out/" not in before
    ] == [word for word in own if "out/" not in word]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("a function", "doctor")])
def test_the_command_line_accepts_every_suggestion(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "runs" / "my x" / "policy.toml"  # which the fallback search of the cases has written
    policy.parent.mkdir(parents=True)
    policy.write_text('policy = "fp16"\n')
    for step in page_of(CASES[name][0]).steps:
        is_accepted(step.command)
    assert "comes after" not in capsys.readouterr().err  # no option of Mezzo among the script's own


@pytest.mark.parametrize("words", HOSTILE, ids=lambda words: words[1][:12])
def test_hostile_words_stay_the_scripts_own(words: tuple[str, ...]) -> None:
    records = [
        run(policy="bf16", words=words),
        run("run", "fp16", words=words, error="floor", exit_code=5),
        compare(
            ("bf16", "equivalent", {}), ("fp16", "diverged", {}), ("fp8", "undecided", {"seeds_needed": 5}), words=words
        ),
        diagnose(
            "range_overflow",
            words=words,
            located=True,
            fix="f",
            fix_policy="fp16:fp32_modules=a.*+b?",
            fix_tried=True,
        ),
        diagnose("invalid_operation", words=words, fix="f", fix_line="x"),
    ]
    for record in records:
        steps = page_of(record).steps
        assert steps
        for step in steps:
            is_accepted(step.command, words)


def test_the_answer_of_a_page_is_about_the_policy_to_train_with() -> None:
    slower = {"speedup": 1.1, "speedup_low": 0.99, "speedup_high": 1.2, "memory_ratio": 0.8}
    smaller = {
        "speedup": 1.0,
        "speedup_low": 0.9,
        "speedup_high": 1.1,
        "memory_ratio": 0.5,
    }  # neither is faster for certain
    record = compare(("bf16", "equivalent", slower), ("fp16", "equivalent", smaller))
    assert page_of(record).steps[0].why == "train with fp16"
    assert "memory, fp16" in [fact.what for fact in page_of(record).answer.facts]


def test_there_are_three_at_most_and_no_command_twice() -> None:
    rows: list[tuple[str, Verdict, dict[str, object]]] = [(f"fp16:init_scale={2**k}", "diverged", {}) for k in range(8)]
    steps = page_of(compare(*rows)).steps
    assert len(steps) == len({step.command for step in steps}) == MOST


def test_control_characters_do_not_reach_the_terminal() -> None:
    steps = page_of(run(policy="bf16", words=("train.py", "\x1b[31mred\x07"))).steps
    assert steps
    assert not any("\x1b" in step.command or "\x07" in step.command for step in steps)


def test_the_terminal_shows_commands_that_can_be_copied() -> None:
    record = compare(
        ("bf16", "equivalent", {}),
        ("fp16", "undecided", {"seeds_needed": 5}),
        words=("train.py", *["--a long one"] * 9),
    )
    console = Console(file=io.StringIO(), width=40, color_system=None)
    terminal.render(record, console, files="record and report: here")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    first, second = page_of(record).steps
    after = lines[lines.index(f"Next: {first.why}") - 1 :]
    assert after[:3] == ["", f"Next: {first.why}", f"  {first.command}"]
    assert after[3:5] == ["", f"Or: {second.why}"[: len(after[4])]]  # a reason may wrap, a command may not
    assert f"  {second.command}" in after


def test_the_page_has_the_commands_as_text() -> None:
    record = run(policy="bf16", words=("train.py", "<script>alert(1)</script>", "&"))
    page = render_html(record)
    commands = [html.escape(step.command).replace("&#x27;", "&#39;") for step in page_of(record).steps]
    assert commands
    assert all(command in page for command in commands)
    assert "<script>alert" not in page
