"""A page of every kind, with long names and several formats, for the tests in a browser."""

from __future__ import annotations

from pathlib import Path

import record_builders as build
from mezzo.commands.compare.page import page_together
from mezzo.records import (
    AnyRecord,
    AuditRecord,
    Casts,
    CastTotal,
    CompareRecord,
    DiagnoseRecord,
    FallbackRecord,
    Finding,
    FormatLimits,
    Histogram,
    KindRange,
    ModuleError,
    Note,
    Operand,
    Operation,
    Pass,
    RangesRecord,
    ScaleWindow,
    TensorRange,
    TrendStep,
    UpdateLoss,
    Verification,
    WideProduct,
)
from mezzo.report.html import write_html, write_index, write_page
from mezzo.report.index import entry_of, index_sheet

LONG = "fp16:fp32_modules=encoder.layers.*.attention+head.*:init_scale=1024:growth_interval=100"


def long_names() -> CompareRecord:
    """Return a comparison with a long policy, a long reason and an error without a space."""
    rows = build.compare_rows()
    rows[2] = rows[2].model_copy(update={"policy": LONG, "reason": "because" * 40})
    runs = [build.run_record(LONG, error="unbroken" * 60), *build.compare_record().runs]
    return build.compare_record(rows=rows, runs=runs)


def audit(folder: Path) -> AuditRecord:
    """Return an audit of a script in ``folder``, whose lines the page shows."""
    script = folder / "audited.py"
    script.write_text("".join(f"x = x.float() @ weight_{n}  # <b>\n" for n in range(30)), encoding="utf-8")
    line = f"{script}:12"
    operations = [
        Operation(
            op="mm",
            module=f"encoder.layers.{n}.{part}",
            phase="forward",
            inputs=[form],
            outputs=[form],
            format=form,
            flops=10**9 * (n + 1),
            bytes=2**20,
        )
        for n in range(4)
        for part, form in (("attention", "fp16"), ("mlp", "fp16"), ("norm", "fp32"))
    ]
    finding = Finding(
        code="A103",
        title="a module leaves autocast",
        modules=["encoder.layers.0.norm"],
        detail="it does",
        gain="much",
        fix="remove it",
        share=0.3,
        flops=10,
        lines=[line],
    )
    return AuditRecord(
        run=build.run_record(
            script=str(script), script_sha256="", environment=build.environment(date="2999-01-01T00:00:00+00:00")
        ),
        steps=[2],
        operations=operations,
        flops_by_phase={
            "forward": {"fp16": 20 * 10**9, "fp32": 10**10},
            "dgrad": {"fp16": 20 * 10**9},
            "wgrad": {"fp16": 20 * 10**9},
        },
        casts=[
            CastTotal(
                module="encoder.layers.0.norm",
                phase="forward",
                of="activation",
                source="fp16",
                target="fp32",
                bytes=4096,
                line=line,
            )
        ],
        wide_products=[
            WideProduct(
                op="mm",
                module="encoder.layers.0.norm",
                format="fp32",
                cause="off",
                reason="autocast is off",
                flops=10,
                line=line,
            )
        ],
        findings=[finding],
        notes=[Note(what="kernels", value="not recorded", reason="the model ran on cpu")],
    )


def diagnosis(folder: Path) -> DiagnoseRecord:
    """Return a diagnosis of a line of a script in ``folder``."""
    script = folder / "diagnosed.py"
    script.write_text("".join(f"y = model_{n}(x) ** 2\n" for n in range(20)), encoding="utf-8")
    trend = [TrendStep(step=n, loss=1.5 * n, grad_norm=2.0, loss_scale=512.0, skipped=n == 9) for n in range(5, 10)]
    return DiagnoseRecord(
        run=build.run_record(
            script=str(script), script_sha256="", environment=build.environment(date="2999-01-01T00:00:00+00:00")
        ),
        verdict="range_overflow",
        module="encoder.layers.11.attention.output.dense",
        op="pow",
        phase="forward",
        step=9,
        line=f"{script}:7",
        fix="keep the module in FP32",
        fix_line="mezzo run --policy fp16:fp32_modules=encoder.layers.11.attention.output.dense train.py",
        fix_note="tried: healthy",
        located=True,
        detail="a value of 7e4 is squared, and FP16 ends at 65504",
        format="fp16",
        operands=[Operand(format="fp16", shape=[8, 64], largest=7e4, smallest=1e-3)],
        num_skipped=1,
        trend=trend,
        passes=[Pass(policy="fp16", reason="to find the first step that is not finite", num_steps=9, outcome="found")],
    )


def ranges() -> RangesRecord:
    """Return ranges of five kinds in two formats."""

    def kind(name: str, first: int) -> KindRange:
        casts = [
            Casts(
                format=f,
                zeroed=[20 - n // 4 for n in range(65)],
                subnormal=[0] * 65,
                overflowed=[max(0, n - 50) for n in range(65)],
            )
            for f in ("fp16", "bf16")
        ]
        return KindRange(
            kind=name,
            num_tensors=3,
            histogram=Histogram(first_exponent=first, counts=[2, 9, 20, 12, 3], zeros=4),
            casts=casts,
        )  # type: ignore[arg-type]

    names = ("activations", "activation gradients", "weight gradients", "weights", "updates")
    tensors = [
        TensorRange(
            kind="weight gradients",
            name=f"Net.encoder.layers.{n}.attention.output.dense.weight",
            histogram=Histogram(first_exponent=-20, counts=[4]),
        )
        for n in range(4)
    ]
    return RangesRecord(
        run=build.run_record("fp32", num_steps=20),
        policy="fp16",
        format="fp16",
        steps_watched=[1, 2],
        first_scale=-24,
        little=0.01,
        limits=[
            FormatLimits(format="fp16", smallest=-24, normal=-14, largest=15),
            FormatLimits(format="bf16", smallest=-133, normal=-126, largest=127),
        ],
        kinds=[kind(name, -4 * n) for n, name in enumerate(names)],
        tensors=tensors,
        windows=[
            ScaleWindow(
                format="fp16",
                lowest=2,
                highest=20,
                suggested=18,
                lost_unscaled=0.4,
                reason="2 doublings below the first overflow",
                at_top=["head.weight"],
            ),
            ScaleWindow(format="bf16", lowest=-100, highest=100, suggested=0, reason="nothing becomes zero"),
        ],
        updates=[UpdateLoss(format="bf16", num_updates=100, num_swallowed=60, worst={"head.weight": 0.9})],
        notes=[Note(what="forward overflow", value="head (up to 2^17)", reason="beyond fp16's 65504")],
    )


def fallback() -> FallbackRecord:
    """Return a search that found one module."""
    modules = [
        ModuleError(
            module=f"encoder.layers.{n}.attention",
            type="Attention",
            output=0.2 / (n + 1),
            dgrad=0.001,
            flops=10**9,
            kept=n == 0,
        )
        for n in range(5)
    ]
    return FallbackRecord(
        run=build.run_record("fp32", num_steps=2),
        policy="fp16",
        tolerance=0.02,
        verdict="found",
        reason="checked on 2 fresh batches",
        kept=["encoder.layers.0.attention"],
        suggested="fp16:fp32_modules=encoder.layers.0.attention",
        fp32_share=0.012,
        error_before=0.2,
        error_after=0.0025,
        modules=modules,
        verifications=[
            Verification(kept=["encoder.layers.0.attention"], error=0.0025, tensor="a.bias", steps=[1], passed=True)
        ]
        * 3,
        ignored=[Note(what="key.bias", value="1.3", reason="FP32 does not determine it")],
        notes=[Note(what="weights", value="as at the beginning", reason="updates are held back")],
    )


def write_pages(folder: Path) -> dict[str, Path]:
    """Write a page of every kind to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    records: dict[str, AnyRecord] = {
        "compare": build.compare_record(),
        "check": build.check_record(patch="--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-<b>\n+x\n"),
        "predict": build.predict_record(
            detail=build.prediction_detail(), slurm=["#SBATCH --nodes=1", "#SBATCH --gres=gpu:a100:1"]
        ),
        "real-gpus": build.compare_record(real_gpus=build.real_gpus()),
        "long-names": long_names(),
        "emulated": build.emulated_record(),
        "large": build.compare_record(num_seeds=5, num_steps=10_000),
        "run": build.run_record(),
        "failed": build.run_record(error="unbroken" * 60),
        "audit": audit(folder),
        "diagnose": diagnosis(folder),
        "ranges": ranges(),
        "fallback": fallback(),
        "tune": build.tune_record(),
        "resume-check": build.resume_check_record(),
        "gate": build.gate_record(),
        "doctor": build.doctor_record(),
    }
    pages = {name: folder / name / "report.html" for name in records}
    for name, record in records.items():
        write_html(record, pages[name], typed=str(folder / "train.py"))
    pages |= {"together": folder / "together.html", "index": folder / "index.html"}
    write_page(page_together([build.compare_record(), long_names()]), pages["together"])
    entries = [entry_of(folder / name / "record.json", record, folder) for name, record in records.items()]
    write_index(index_sheet(entries, folder), pages["index"])
    return pages
