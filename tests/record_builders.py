"""Realistic records for the tests of the views."""

from __future__ import annotations

import math
import random

from mezzo.records import (
    Answer,
    CheckRecord,
    CheckStage,
    CompareRecord,
    DeviceReport,
    DiffBeginning,
    Difference,
    DiffOutcome,
    DiffRecord,
    DoctorRecord,
    Effective,
    Environment,
    Finding,
    FormatChange,
    FormatSupport,
    Gain,
    GateCheck,
    GateRecord,
    Memory,
    Metric,
    MissingState,
    ModuleGrowth,
    Note,
    PointDifference,
    PredictionDetail,
    PredictRecord,
    RealGpus,
    ResumeCheckRecord,
    Row,
    RunRecord,
    Steps,
    TuneRecord,
    TuneRow,
    TuneTrial,
    ValuePair,
    ValuePlace,
    Verdict,
)

MIB = 1024**2
NAN = float("nan")
STEP_MS = {"fp32": 41.2, "bf16": 25.6, "fp16": 24.9, "fp16-pure": 23.8}
SHARES = {
    "fp32": {"fp32": 1_000_000},
    "bf16": {"bf16": 973_000, "fp32": 27_000},
    "fp16": {"fp16": 973_000, "fp32": 27_000},
    "fp16-pure": {"fp16": 1_000_000},
}
MEMORY = {
    "fp32": Memory(
        parameters_bytes=324 * MIB,
        gradients_bytes=324 * MIB,
        optimizer_bytes=648 * MIB,
        activations_bytes=1210 * MIB,
    ),
    "bf16": Memory(
        parameters_bytes=324 * MIB,
        gradients_bytes=324 * MIB,
        optimizer_bytes=648 * MIB,
        activations_bytes=742 * MIB,
    ),
    "fp16": Memory(
        parameters_bytes=324 * MIB,
        gradients_bytes=324 * MIB,
        optimizer_bytes=648 * MIB,
        activations_bytes=742 * MIB,
    ),
    "fp16-pure": Memory(
        parameters_bytes=162 * MIB,
        gradients_bytes=162 * MIB,
        optimizer_bytes=324 * MIB,
        activations_bytes=601 * MIB,
    ),
}


def environment(**fields: object) -> Environment:
    known: dict[str, object] = {
        "date": "2026-02-03 14:05:09 UTC",
        "mezzo": "0.1.0",
        "python": "3.11.9",
        "torch": "2.13.0",
        "os": "Linux 6.8",
        "cpu": "AMD EPYC 9554",
        "threads": 16,
        "device": "cuda",
        "gpu": "NVIDIA H100 80GB HBM3",
        "driver": "570.86.15",
        "cuda": "12.8",
    }
    return Environment.model_validate(known | fields)


def explanation(policy: str) -> list[Note]:
    if policy == "fp32":
        value, reason = "fp32", "the policy casts nothing; TF32 is off"
        return [Note(what="compute", value=value, reason=reason)]
    return [
        Note(
            what="compute",
            value=f"{policy}, native on NVIDIA H100 80GB HBM3",
            reason="compute capability 9.0; matrix units take it from 8.0",
        ),
        Note(
            what="weights",
            value="fp32",
            reason="the optimizer updates them in FP32, so small updates are kept",
        ),
        Note(
            what="loss scale",
            value="dynamic from 65536, grows every 2000 updates",
            reason="small gradients would become zero in fp16",
        ),
    ]


def steps(policy: str, seed: int, *, num_steps: int = 200) -> Steps:
    """Return a falling loss; ``fp16`` skips three early steps, ``fp16-pure`` turns to NaN after 60%."""
    dice = random.Random(f"{policy} {seed}")
    loss = [2.3 * math.exp(-i / (num_steps / 4)) + 0.35 + dice.gauss(0, 0.03) for i in range(num_steps)]
    scale, scales, skipped = 65536.0, [], []
    for i in range(num_steps):
        skip = policy == "fp16" and i in (0, 1, num_steps // 2 + seed)
        scale = scale / 2 if skip else scale
        scales.append(scale)
        skipped.append(skip)
    if policy == "fp16-pure":
        start = int(num_steps * 0.6) + 5 * seed
        loss = [v * (1 + max(0, i - start + 12) ** 2 / 4) for i, v in enumerate(loss)]
        loss[start:] = [NAN] * (num_steps - start)
    times = [STEP_MS.get(policy, 30.0) * (1 + abs(dice.gauss(0, 0.04))) for _ in range(num_steps)]
    return Steps(
        loss=loss,
        loss_scale=scales if policy == "fp16" else [],
        skipped=skipped,
        grad_norm=[1.0] * num_steps,
        time_ms=times,
        cpu_ms=times,
    )


def run_record(policy: str = "fp16", *, seed: int = 0, num_steps: int = 200, **fields: object) -> RunRecord:
    effective = Effective(
        flops_by_format=SHARES.get(policy, {}),
        counted_on_step=2,
        left_alone=[
            Note(
                what="encoder.attention.flash_attn",
                value="fp32",
                reason="a custom autograd function with no autocast rule",
            )
        ]
        if policy in ("fp16", "bf16")
        else [],
    )
    known: dict[str, object] = {
        "command": ["mezzo", "run", "--policy", policy, "train.py", "--epochs", "3"],
        "script": "examples/train.py",
        "script_sha256": "0" * 64,
        "policy": policy,
        "explanation": explanation(policy),
        "seed": seed,
        "environment": environment(),
        "steps": steps(policy, seed, num_steps=num_steps),
        "memory": MEMORY.get(policy, Memory()),
        "effective": effective,
        "metric": Metric(name="accuracy", pattern="accuracy (.*)", steps=[num_steps], values=[0.91 + 0.001 * seed]),
        "duration_s": 12.34,
    }
    return RunRecord.model_validate(known | fields)


def difference(value: float, baseline: float, *, spread: float, margin: float) -> Difference:
    return Difference(
        value=value,
        baseline=baseline,
        difference=value - baseline,
        low=value - baseline - spread,
        high=value - baseline + spread,
        margin=margin,
    )


def row(policy: str, verdict: Verdict, **fields: object) -> Row:
    memory = MEMORY.get(policy, MEMORY["fp32"])
    known: dict[str, object] = {
        "policy": policy,
        "num_runs": 3,
        "step_ms": STEP_MS.get(policy, 30.0),
        "memory": memory,
        "memory_ratio": memory.total_bytes / MEMORY["fp32"].total_bytes,
        "share_by_format": run_record(policy, num_steps=2).effective.share_by_format,
        "verdict": verdict,
        "reason": f"{policy} is {verdict}.",
    }
    return Row.model_validate(known | fields)


def compare_rows() -> list[Row]:
    return [
        row(
            "fp32",
            "baseline",
            speedup=1.0,
            loss=difference(0.3921, 0.3921, spread=0.0, margin=0.02),
            metric=difference(0.911, 0.911, spread=0.0, margin=0.009),
            reason="all others are compared with it",
        ),
        row(
            "bf16",
            "equivalent",
            speedup=1.609,
            speedup_low=1.572,
            speedup_high=1.655,
            loss=difference(0.3934, 0.3921, spread=0.0052, margin=0.02),
            metric=difference(0.9104, 0.911, spread=0.002, margin=0.009),
            reason="the loss differs by +0.0013 (-0.0039 to +0.0065), inside the margin of 0.02",
        ),
        row(
            "fp16",
            "undecided",
            speedup=1.655,
            speedup_low=1.61,
            speedup_high=1.702,
            loss=difference(0.4012, 0.3921, spread=0.0215, margin=0.02),
            metric=difference(0.9098, 0.911, spread=0.004, margin=0.009),
            num_skipped=3.0,
            final_scale=8192.0,
            seeds_needed=7,
            reason="the loss differs by +0.0091 (-0.0124 to +0.0306), across the margin of 0.02",
        ),
        row(
            "fp16-pure",
            "diverged",
            speedup=1.731,
            speedup_low=1.68,
            speedup_high=1.79,
            loss=Difference(value=NAN, baseline=0.3921, difference=NAN, low=NAN, high=NAN, margin=0.02),
            metric=None,
            reason="the loss is NaN from step 121, in 3 of 3 runs",
        ),
    ]


def compare_record(*, num_seeds: int = 3, num_steps: int = 200, **fields: object) -> CompareRecord:
    """Return four policies on one script; one skips steps, one ends in NaN."""
    rows = compare_rows()
    policies = ",".join(row.policy for row in rows)
    known: dict[str, object] = {
        "command": ["mezzo", "compare", "--policies", policies, "train.py", "--epochs", "3"],
        "baseline": "fp32",
        "margin": 0.01,
        "rows": rows,
        "runs": [run_record(row.policy, seed=seed, num_steps=num_steps) for seed in range(num_seeds) for row in rows],
        "environment": environment(),
    }
    return CompareRecord.model_validate(known | fields)


def emulated_record(*, num_steps: int = 60) -> CompareRecord:
    """Return a comparison on a CPU that emulates 16-bit formats; the rows carry numbers that must not be shown."""
    whole = compare_record(num_steps=num_steps)
    claims = {"emulated": True, "speedup": 9.87, "speedup_low": 9.86, "speedup_high": 9.88}
    rows = [row if row.verdict == "baseline" else row.model_copy(update=claims) for row in whole.rows]
    runs = [
        run.model_copy(update={"effective": run.effective.model_copy(update={"emulated": run.policy != "fp32"})})
        for run in whole.runs
    ]
    cpu = environment(device="cpu", gpu=None, driver=None, cuda=None)
    return whole.model_copy(update={"rows": rows, "runs": runs, "environment": cpu})


def check_record(**fields: object) -> CheckRecord:
    """Return the check of a script under four policies, answered by the second."""
    comparison = compare_record(num_steps=20)
    gains = [
        Gain(
            kind="measured",
            times=1.609,
            low=1.572,
            high=1.655,
            device="NVIDIA H100 80GB HBM3",
            note="median step, 3 seeds",
        ),
        Gain(
            kind="bound",
            times=6.4,
            device="A100-SXM4-80GB",
            note="90% of the FLOPs are in products that it runs faster",
        ),
    ]
    answer = Answer(
        decision="use",
        policy="bf16",
        why="bf16 trains like fp32",
        evidence=comparison.rows[1].reason,
        evidence_of=comparison.rows[1].policy,
        gains=gains,
        memory_saved=0.232,
        others=[Note(what="fp16-pure", value="diverged", reason="the loss is NaN from step 121")],
        next_command="mezzo run --policy bf16 examples/train.py --epochs 3",
        next_why="trains under it, with the script unedited",
    )
    stages = [
        CheckStage(
            name="run", what="fp32, seed 0", why="the baseline", outcome="20 steps", folder="runs/x", duration_s=12.0
        ),
        CheckStage(
            name="diagnose", what="diagnose fp16-pure", why="to find why", outcome="range overflow", resumed=True
        ),
    ]
    known: dict[str, object] = {
        "command": ["mezzo", "check", "train.py", "--epochs", "3"],
        "script": "examples/train.py",
        "answer": answer,
        "device": doctor_record().devices[1],
        "offered": [Note(what="tf32", value="left out", reason="no units for it")],
        "budget_s": 600.0,
        "seeds": 3,
        "stages": stages,
        "comparison": comparison,
        "notes": [Note(what="judged by", value="the training loss", reason="no metric was named")],
        "environment": environment(),
    }
    return CheckRecord.model_validate(known | fields)


def resume_check_record(**fields: object) -> ResumeCheckRecord:
    """Return a check of a script that does not restore its optimizer, and restarts a generator without effect."""
    missing = MissingState(
        state="optimizer",
        name="Adam",
        undisturbed="step 8, exp_avg 0.0483",
        resumed="none: it starts over",
        evidence="root mean squares of step, exp_avg before the first resumed update",
        fix="save optimizer.state_dict(), and load it after the optimizer is created",
    )
    run = run_record("as-is", num_steps=16, script="train.py")
    values: dict[str, object] = {
        "command": ["mezzo", "resume-check", "train.py"],
        "script": "train.py",
        "verdict": "differs",
        "why": "resumed after step 8, without the right optimizer",
        "num_steps": 16,
        "stopped_after": 10,
        "stopped_by": "SIGKILL",
        "resumed_at": 8,
        "resumed_steps": 8,
        "first_difference": 9,
        "missing": [missing],
        "without_effect": [
            Note(what="random generators", value="python: another state", reason="nothing drew from it")
        ],
        "checkpoints": ["/work/last.pt"],
        "folder": "runs/x",
        "whole": run,
        "resumed": run_record("as-is", num_steps=8),
        "environment": run.environment,
    }
    return ResumeCheckRecord(**(values | fields))  # type: ignore[arg-type]


def diff_record(**fields: object) -> DiffRecord:
    """Return two scripts whose LayerNorms have different eps."""

    def place(op: str, module: str, line: str) -> ValuePlace:
        return ValuePlace(op=op, module=module, phase="forward", step=1, line=line, format="fp32")

    run = run_record("as-is", num_steps=2, script="train.py")
    beginning = DiffBeginning(
        a=place("layer_norm", "norm", "old.py:9"),
        b=place("layer_norm", "norm", "new.py:9"),
        distance=4.9e-6,
        allowed=9.5e-7,
        error_a=1.1e-7,
        error_b=1.2e-7,
        by="settings",
        settings=[("1e-05", "1e-06")],
        num_alike=2,
    )
    values: dict[str, object] = {
        "command": ["mezzo", "diff", "old.py", "new.py"],
        "script": "train.py",
        "mode": "scripts",
        "name_a": "old.py",
        "name_b": "new.py",
        "verdict": "beyond rounding",
        "run": run,
        "other": run_record("as-is", num_steps=2, script="new.py"),
        "steps": [1, 2],
        "num_values": 470,
        "num_paired": 468,
        "num_identical": 12,
        "has_control": True,
        "first": ValuePair(**beginning.model_dump(include=set(ValuePair.model_fields))),
        "beginnings": [beginning],
        "outcomes": [DiffOutcome(what="loss", step=1, distance=2.4e-6, allowed=9.5e-7)],
        "points": [
            PointDifference(
                name="logprobs",
                against="both runs",
                distance=1e-3,
                is_log_probabilities=True,
                kl=2e-5,
                outside=0.08,
            )
        ],
        "growth": [
            ModuleGrowth(module="norm", phase="forward", step=1, bits=17.6, explained_bits=20.0),
            ModuleGrowth(module="head", phase="forward", step=1, bits=17.1, explained_bits=19.0),
        ],
        "environment": run.environment,
        "duration_s": 12.0,
    }
    return DiffRecord(**(values | fields))  # type: ignore[arg-type]


def gate_record(**fields: object) -> GateRecord:
    """Return a script whose loss rose and of which a module left its format."""
    run = run_record("as-is", num_steps=20, script="train.py")
    finding = {"modules": ["encoder"], "detail": "it does", "gain": "much", "fix": "remove it", "share": 0.3}
    known: dict[str, object] = {
        "command": ["mezzo", "gate", "--golden", "golden.json", "train.py"],
        "script": "train.py",
        "golden_file": "golden.json",
        "verdict": "regressed",
        "policy": "as-is",
        "against": None,
        "checks": [
            GateCheck(name="steps", status="same", golden=20.0, now=20.0),
            GateCheck(name="loss", status="failed", golden=1.18, now=1.6, margin=0.02, error=2e-5),
            GateCheck(name="memory", status="same", golden=2.0**20, now=2.0**20, margin=2.0**20 / 100, unit="bytes"),
            GateCheck(name="speed", status="not compared", reason="the golden is of another cpu"),
            GateCheck(name="formats", status="failed", reason="encoder: bf16 then, fp32 now (forward)"),
            GateCheck(name="findings", status="failed", golden=1.0, now=2.0, reason="new: A103"),
        ],
        "format_changes": [FormatChange(module="encoder", phase="forward", golden=["bf16"], now=["fp32"])],
        "findings": [
            Finding.model_validate({"code": "A101", "title": "needless casts", **finding}),
            Finding.model_validate({"code": "A103", "title": "a module opts out of autocast", **finding}),
        ],
        "new_findings": ["A103"],
        "notes": [Note(what="cpu", value="another", reason="AMD EPYC then, Intel Xeon now")],
        "runs": [run],
        "environment": run.environment,
        "duration_s": 12.0,
    }
    return GateRecord(**(known | fields))  # type: ignore[arg-type]


def tune_record(**fields: object) -> TuneRecord:
    """Return a search that found a faster configuration among several."""
    rows = [
        TuneRow(
            name="as-is",
            policy="as-is",
            state="now",
            reason="what the script does now",
            steps=80,
            step_ms=212.0,
            inputs=1.0,
        ),
        TuneRow(
            name="bf16, batch-size 64, compiled",
            policy="bf16",
            settings={"batch-size": "64"},
            compiles=True,
            state="faster",
            reason="equivalent, compared with fp32 over the first 80 steps: loss 0.41 against 0.41",
            steps=80,
            step_ms=251.0,
            inputs=2.0,
            speedup=1.69,
            speedup_low=1.61,
            speedup_high=1.77,
            memory_bytes=9 * 2**30,
            verdict="equivalent",
        ),
        TuneRow(
            name="bf16, batch-size 128",
            policy="bf16",
            settings={"batch-size": "128"},
            state="barred",
            reason="it needs 17 GiB, above the limit of 12 GiB",
            memory_bytes=17 * 2**30,
        ),
    ]
    known: dict[str, object] = {
        "command": ["mezzo", "tune", "--vary", "batch-size=64,128", "train.py"],
        "script": "examples/train.py",
        "decision": "use",
        "chosen": rows[1].name,
        "why": "1.69 times the inputs a second of the script now",
        "next_command": "mezzo run --policy bf16 --compile train.py --batch-size 64",
        "next_why": "trains this way, with the script unedited",
        "rows": rows,
        "trials": [TuneTrial(name="as-is", round="1", seed=0, outcome="212 ms a step", folder="runs/x", resumed=True)],
        "budget_s": 600.0,
        "steps": 20,
        "repeats": 3,
        "notes": [Note(what="fp16", value="left out", reason="emulated here")],
        "environment": environment(),
    }
    return TuneRecord.model_validate(known | fields)


def doctor_record() -> DoctorRecord:
    formats = [
        FormatSupport(format="fp32", level="native", reason="every device computes in it"),
        FormatSupport(
            format="fp16",
            level="emulated",
            reason="the CPU has neither avx512_fp16 nor amx_fp16",
        ),
        FormatSupport(format="e4m3", level="impossible", reason="no rule for it on this device"),
    ]
    gpu = [
        FormatSupport(format="fp16", level="native", reason="compute capability 9.0; matrix units take it"),
    ]
    return DoctorRecord(
        environment=environment(),
        devices=[
            DeviceReport(kind="cpu", name="AMD EPYC 9554", formats=formats),
            DeviceReport(
                kind="cuda",
                name="NVIDIA H100 80GB HBM3",
                compute_capability="9.0",
                memory_bytes=80 * 1024**3,
                formats=gpu,
            ),
        ],
        tf32=[Note(what="matrix products", value="off", reason="torch's default is 'highest'")],
        advice=[
            Note(
                what="TF32",
                value="turn it on",
                reason="matrix products in FP32 models then use the matrix units",
            )
        ],
    )


def predict_record(**fields: object) -> PredictRecord:
    """Return predictions for ResNet-50 on two GPUs, of which one cannot compute BF16."""
    possible = {
        "possible": True,
        "validated": True,
        "step_ms": 103.6,
        "throughput": 2471.0,
        "throughput_low": 1980.0,
        "throughput_high": 2902.0,
        "bounds": {"arithmetic": 0.3, "bandwidth": 0.68, "launch": 0.02},
        "modules": [{"module": "layer1.0.conv1", "share": 0.11, "bound": "bandwidth"}],
        "allocated_bytes": 11 * 2**30,
        "reserved_bytes": 12 * 2**30,
        "device_bytes": 13 * 2**30,
        "memory_bytes": {"activations": 10 * 2**30, "parameters": 2**30},
        "fits": True,
        "largest_batch": 1480,
        "over_fp32": 3.8,
        "over_tf32": 2.1,
        "verdict": "Worth it.",
    }
    known: dict[str, object] = {
        "environment": environment(),
        "command": ["mezzo", "predict", "--model", "timm:resnet50"],
        "model": "timm:resnet50",
        "input": "224 x 224",
        "unit": "images",
        "batch": 256,
        "optimizer": "sgd",
        "channels_last": True,
        "headroom": 0.13,
        "predictions": [
            {"gpu": "a100-80gb", "gpu_bytes": 80 * 2**30, "policy": "bf16", **possible},
            {
                "gpu": "t4",
                "gpu_bytes": 16 * 2**30,
                "policy": "bf16",
                "possible": False,
                "reason": "T4 has no units for BF16",
            },
        ],
        "assumptions": [Note(what="layout", value="channels-last", reason="as asked for")],
    }
    return PredictRecord.model_validate(known | fields)


def prediction_detail() -> PredictionDetail:
    """Return a detail with two policies, three places and three modules."""
    return PredictionDetail.model_validate(
        {
            "gpu": "a100-80gb",
            "policy": "bf16",
            "limit_bytes": 79 * 2**30,
            "curves": [
                {"policy": "fp32", "batches": [1, 2, 3], "throughput": [10.0, 15.0, 18.0]},
                {"policy": "bf16", "batches": [1, 2, 4], "throughput": [12.0, 20.0, 30.0]},
            ],
            "timeline": {
                "places": [0, 1, 2],
                "kinds": {"parameters": [2**30] * 3, "activations": [0, 2 * 2**30, 2**30]},
                "backward": 2,
                "optimizer": 3,
            },
            "modules": [
                {"module": "body.0", "ms": {"bandwidth": 5.0}},
                {"module": "body.1", "ms": {"arithmetic": 3.0}},
                {"module": "head", "ms": {"launch": 2.0}},
            ],
        }
    )


def real_gpus() -> RealGpus:
    """Return the predictions of a comparison on two GPUs."""
    record = predict_record()
    return RealGpus(
        gpus=["a100-80gb", "t4"],
        batch=256,
        unit="samples",
        predictions=record.predictions,
        assumptions=record.assumptions,
    )
