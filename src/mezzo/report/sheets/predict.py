"""Predictions as display strings: one line for each GPU and policy, the verdict last."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from mezzo.records import Prediction, PredictionDetail, PredictRecord, RealGpus
from mezzo.report import bodies, terminal
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.answers import Headline
from mezzo.report.sheets.compare import CompareSheet
from mezzo.report.sheets.shared import Fact, Grid, Sheet


@dataclass(frozen=True, kw_only=True)
class PredictLine:
    """One GPU under one policy."""

    gpu: str
    card: str
    """The GPU's memory as sold; empty if the record does not have it."""
    policy: str
    throughput: str = fmt.MISSING
    band: str = fmt.MISSING
    step: str = fmt.MISSING
    memory: str = fmt.MISSING
    device: str = fmt.MISSING
    """The memory of the device that it takes, and whether that is more than there is."""
    largest: str = fmt.MISSING
    speed_ups: str = fmt.MISSING
    over_fp32: str = fmt.MISSING
    cost: str = fmt.MISSING
    bound: str = fmt.MISSING
    possible: bool = True
    validated: bool = True
    verdict: str
    modules: list[Fact] = field(default_factory=list)
    kinds: list[Fact] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PredictSheet(Sheet):
    """The words and tables of a predict record, ready for any view."""

    model: str
    details: str
    unit: str
    largest_head: str
    cost_head: str
    """Empty if no price is known."""
    slurm: str
    fit: list[Fact]
    """Whether the batch fits each GPU, and the largest that does."""
    lines: list[PredictLine]
    assumptions: list[Fact]


def predict_sheet(record: PredictRecord) -> PredictSheet:
    """Return the sheet of ``record``."""
    return PredictSheet(
        title=f"{_model(record)}: prediction",
        model=fmt.clean(record.model),
        headline=_headline(record),
        details=f"Input: {fmt.clean(record.input)}. Optimizer: {fmt.clean(record.optimizer)}{_job(record)}. "
        f"Predicted, not measured. {_band(record)}",
        unit=fmt.clean(record.unit),
        largest_head=f"largest batch (fits into {1 - record.headroom:.0%} of the memory)",
        cost_head=f"cost per million {fmt.clean(record.unit)}"
        if any(prediction.cost_per_million is not None for prediction in record.predictions)
        else "",
        slurm=fmt.clean("\n".join(record.slurm), keep_lines=True),
        fit=_fit(record),
        lines=[_line(prediction, _trade(prediction, record)) for prediction in record.predictions],
        assumptions=shared.facts(record.assumptions),
        environment=shared.environment_facts(record.environment),
        command=shared.command_text(record.command, record.environment),
    )


def predict_answer(record: PredictRecord, sheet: PredictSheet) -> Headline:
    """Return the answer at the top of the page: the fastest GPU that the batch fits."""
    best = record.best
    if best is None:
        return Headline(tone="bad", word="does not fit")
    facts = [
        Fact(
            what=f"{sheet.unit}/s",
            value=fmt.rate_text(best.throughput),
            reason=band_text(best),
        ),
        Fact(
            what="memory, device",
            value=fmt.bytes_text(best.device_bytes),
            reason=_fitting(best) or f"{fmt.bytes_text(best.allocated_bytes)} allocated",
        ),
        Fact(
            what="over FP32", value=fmt.ratio_text(best.over_fp32), reason=f"over TF32 {fmt.ratio_text(best.over_tf32)}"
        ),
    ]
    if best.largest_batch is not None:
        facts.append(
            Fact(
                what="largest batch",
                value=fmt.count_text(best.largest_batch),
                reason=f"fits into {1 - record.headroom:.0%} of the memory",
            )
        )
    return Headline(tone="quiet", word="predicted", facts=facts)


def _fitting(best: Prediction) -> str:
    """Return how much memory stays free if the batch fits; empty if the memory is not known."""
    if not best.fits or not best.gpu_bytes:
        return ""
    return f"fits: {1 - best.device_bytes / best.gpu_bytes:.0%} of {fmt.bytes_text(best.gpu_bytes)} stays free"


def _band(record: PredictRecord) -> str:
    if all(prediction.gpu == "cpu" for prediction in record.predictions):
        return (
            "The band is that of the trainings that calibrated this machine; no largest batch is predicted for a CPU."
        )
    return (
        "The band contains 8 of 10 measured trainings on GPU architectures that were left out of the fit; "
        f"the largest batch fits into {1 - record.headroom:.0%} of the memory."
    )


def _model(record: PredictRecord) -> str:
    """Return the name of the model, or of the script's file."""
    return fmt.clean(PurePath(record.model).name if record.model.endswith(".py") else record.model)


def _headline(record: PredictRecord) -> str:
    what = f"Batch {record.batch} of {_model(record)}"
    if record.unit == "steps":
        what = f"A step of {_model(record)}"
    possible = [prediction for prediction in record.predictions if prediction.possible]
    if not possible:
        return f"None of these GPUs can run {_model(record)} under these policies"
    best = record.best
    if best is None:
        return f"{what} fits none of these GPUs"
    return (
        f"{what} runs fastest on {fmt.clean(best.gpu)} in {policy_and_plan(best)}: "
        f"about {fmt.rate_text(best.throughput)} {fmt.clean(record.unit)}/s"
    )


def _fit(record: PredictRecord) -> list[Fact]:
    """Return a line for each GPU: whether the record's batch fits, by policy, with the share of the memory that it leaves free."""
    by_gpu: dict[str, list[Prediction]] = {}
    for prediction in record.predictions:
        if prediction.possible:
            by_gpu.setdefault(prediction.gpu, []).append(prediction)
    lines = []
    for gpu, group in by_gpu.items():
        fitting = [prediction for prediction in group if prediction.fits]
        word = "fits" if len(fitting) == len(group) else "fits under some" if fitting else "does not fit"
        card = f" ({_card(group[0])})" if group[0].gpu_bytes else ""
        each = "; ".join(f"{policy_and_plan(prediction)} {_memory_left(prediction)}" for prediction in group)
        tone = {"fits": "good", "does not fit": "bad"}.get(word, "warn")
        lines.append(Fact(what=f"{fmt.clean(gpu)}{card}", value=word, reason=each, tone=tone))
    if lines and record.no_other_batch:
        lines.append(Fact(what="largest batch", value="not known", reason=fmt.clean(record.no_other_batch)))
    return lines


def _memory_left(prediction: Prediction) -> str:
    """Return the device memory of a prediction, how much is left, and the largest batch."""
    left = ""
    if prediction.gpu_bytes:
        free = 1 - prediction.device_bytes / prediction.gpu_bytes
        left = f", {free:.0%} free" if free >= 0 else f", {-free:.0%} over"
    largest = "" if prediction.largest_batch is None else f", batch up to {fmt.count_text(prediction.largest_batch)}"
    return f"{fmt.bytes_text(prediction.device_bytes)}{left}{largest}"


def _line(prediction: Prediction, trade: str) -> PredictLine:
    gpu, card, policy = fmt.clean(prediction.gpu), _card(prediction), policy_and_plan(prediction)
    if not prediction.possible:
        return PredictLine(gpu=gpu, card=card, policy=policy, possible=False, verdict=verdict_text(prediction))
    bound = max(prediction.bounds, key=lambda kind: prediction.bounds[kind], default="")
    return PredictLine(
        gpu=gpu,
        card=card,
        policy=policy,
        throughput=fmt.rate_text(prediction.throughput),
        band=band_text(prediction),
        step=fmt.ms_text(prediction.step_ms),
        memory=" / ".join(
            fmt.bytes_text(n) for n in (prediction.allocated_bytes, prediction.reserved_bytes, prediction.device_bytes)
        ),
        device=fmt.bytes_text(prediction.device_bytes) + ("" if prediction.fits else ", too much"),
        largest=fmt.MISSING if prediction.largest_batch is None else fmt.count_text(prediction.largest_batch),
        over_fp32=fmt.ratio_text(prediction.over_fp32),
        speed_ups=f"{fmt.ratio_text(prediction.over_fp32)} / {fmt.ratio_text(prediction.over_tf32)}",
        cost=fmt.MISSING
        if prediction.cost_per_million is None
        else fmt.number_text(prediction.cost_per_million, digits=3),
        validated=prediction.validated,
        bound=f"{bound} {fmt.share_text(prediction.bounds[bound])}" if bound else fmt.MISSING,
        verdict=verdict_text(prediction, trade),
        modules=[
            Fact(what=fmt.clean(m.module), value=fmt.share_text(m.share), reason=f"mostly {m.bound}")
            for m in prediction.modules
        ],
        kinds=[Fact(what=k, value=fmt.bytes_text(n), reason="") for k, n in sorted(prediction.memory_bytes.items())],
    )


def band_text(prediction: Prediction) -> str:
    """Return the error band of the throughput."""
    return f"{fmt.rate_text(prediction.throughput_low)} to {fmt.rate_text(prediction.throughput_high)}"


def verdict_text(prediction: Prediction, trade: str = "") -> str:
    """Return whether the policy is worth it on its GPU, or else the ``trade`` of checkpointing, and what limits the prediction."""
    if not prediction.possible:
        return f"{fmt.clean(prediction.reason)}."
    basis = "" if prediction.validated else "Not validated: no measurements to compare it with."
    notes = [
        "" if prediction.fits else "Does not fit.",
        trade or prediction.verdict,
        f"{prediction.reason}." if prediction.reason else "",
        "The rates were measured on this machine; the band is that of its calibration."
        if prediction.calibrated
        else basis,
    ]
    return fmt.clean(" ".join(filter(None, notes)))


def _job(record: PredictRecord) -> str:
    """Return how many GPUs train together, if several do."""
    return f", {record.gpus_per_job} GPUs per job ({fmt.clean(record.shard)})" if record.gpus_per_job > 1 else ""


def policy_and_plan(prediction: Prediction | PredictionDetail) -> str:
    """Return the policy with its plan of checkpointing."""
    return fmt.clean(f"{prediction.policy}, {prediction.checkpoint}" if prediction.checkpoint else prediction.policy)


def _trade(prediction: Prediction, record: PredictRecord) -> str:
    """Return what checkpointing costs and saves, compared with the same policy on the same GPU without it."""
    same = (p for p in record.predictions if (p.gpu, p.policy, p.checkpoint) == (prediction.gpu, prediction.policy, ""))
    plain = next(same, None)
    if not prediction.checkpoint or plain is None or not plain.possible:
        return ""
    slower = prediction.step_ms / plain.step_ms - 1
    saved = fmt.bytes_text(max(0, plain.allocated_bytes - prediction.allocated_bytes))
    return f"Checkpointing saves {saved}; the step takes {slower:.0%} longer."


def _card(prediction: Prediction) -> str:
    return "" if prediction.gpu_bytes is None else fmt.bytes_text(prediction.gpu_bytes)


# --- the terminal --------------------------------------------------------------------------------------------------------------


def print_predict(sheet: PredictSheet, console: Console) -> None:
    """Print a line for each GPU and policy: speed, memory and what bounds the step."""
    console.print(Text(sheet.details, style="dim"))
    heads = ["GPU", "policy", f"{sheet.unit}/s", "10% to 90%", "step", "memory", "largest\nbatch", "over\nFP32"]
    costs = [sheet.cost_head.replace(" per ", "\nper ")] if sheet.cost_head else []
    table = terminal.plain_table(*heads, *costs, "bound by", numbers=range(2, len(heads) + len(costs)))
    table.columns[0].no_wrap = table.columns[3].no_wrap = True
    names = [line.gpu for line in sheet.lines]
    for place, line in enumerate(sheet.lines):
        cells = [line.throughput, line.band, line.step, line.device, line.largest, line.over_fp32]
        cost = [line.cost] if sheet.cost_head else []
        before, alone = names[:place].count(line.gpu), names.count(line.gpu) == 1
        name = f"{line.gpu}\n{line.card}" if alone else {0: line.gpu, 1: line.card}.get(before, "")
        table.add_row(name, line.policy, *cells, *cost, line.bound)
    console.print()
    console.print(table)
    impossible = dict.fromkeys(line.verdict for line in sheet.lines if not line.possible)
    terminal.print_note(console, " ".join(impossible))
    unchecked = list(dict.fromkeys(f"{line.gpu} in {line.policy}" for line in sheet.lines if not line.validated))
    if unchecked:
        terminal.print_note(console, f"Not validated, for want of measurements: {fmt.listed(unchecked)}.")
    _print_slurm(sheet, console)


def predict_details(sheet: PredictSheet, console: Console) -> None:
    """Print whether the batch fits, whether a policy is worth it, all kinds of memory, and what is assumed."""
    terminal.section(console, "Does it fit?", terminal.fact_table(sheet.fit))
    facts = [Fact(what=f"{line.gpu}, {line.policy}", value=line.memory, reason=line.verdict) for line in sheet.lines]
    heads = ("", "allocated / reserved / device", "is it worth it?")
    terminal.section(console, "Memory and worth", terminal.fact_table(facts, heads=heads))
    terminal.section(console, "Assumed", terminal.fact_table(sheet.assumptions))


def _print_slurm(sheet: PredictSheet, console: Console) -> None:
    if sheet.slurm:
        console.print(Text("\nFor Slurm", style="bold"))
        console.print(Text(sheet.slurm), soft_wrap=True)


# --- Predictions for other GPUs, next to measurements on this machine -----------------------------------------------------------

TITLE = "On a real GPU: predicted, not measured"


@dataclass(frozen=True, kw_only=True)
class RealGpusSheet:
    """The table of the predictions, or the reason why there is none."""

    title: str
    caption: str
    table: Grid
    verdicts: list[Fact]
    assumptions: list[Fact]


def real_gpus_sheet(predicted: RealGpus | None) -> RealGpusSheet | None:
    """Return the sheet of ``predicted``; None if no prediction was requested."""
    if predicted is None:
        return None
    unit = fmt.clean(predicted.unit)
    heads = ("GPU", "policy", f"{unit}/s", "10% to 90%", "step", "over FP32", "over TF32", "memory", "largest batch")
    left_out = shared.facts(predicted.not_predicted)
    if predicted.reason:
        caption = f"Not predicted: {fmt.clean(predicted.reason)}."
        return RealGpusSheet(
            title=TITLE, caption=caption, table=Grid(heads=heads, rows=[]), verdicts=left_out, assumptions=[]
        )
    of_batch = f"Batch {predicted.batch} of this script. " if unit != "steps" else ""
    possible = [prediction for prediction in predicted.predictions if prediction.possible]
    verdicts = [
        Fact(what=f"{fmt.clean(prediction.gpu)}, {fmt.clean(prediction.policy)}", value=verdict_text(prediction))
        for prediction in predicted.predictions
    ]
    fits = "" if all(prediction.fits for prediction in possible) else " A batch that does not fit is marked."
    return RealGpusSheet(
        title=TITLE,
        caption=f"{of_batch}A step was traced on this machine without computing its numbers, and timed by formulas that are calibrated on "
        f"public measurements (docs/predict.md); the band contains 8 of 10 measured trainings. Memory is what nvidia-smi would show.{fits}",
        table=Grid(
            heads=heads,
            rows=[_row(prediction) for prediction in predicted.predictions],
            numbers=tuple(range(2, len(heads))),
        ),
        verdicts=[*verdicts, *left_out],
        assumptions=shared.facts(predicted.assumptions),
    )


def _row(prediction: Prediction) -> tuple[str, ...]:
    head = fmt.clean(prediction.gpu), fmt.clean(prediction.policy)
    if not prediction.possible:
        return (*head, *[fmt.MISSING] * 7)
    memory = fmt.bytes_text(prediction.device_bytes) + ("" if prediction.fits else " (does not fit)")
    return (
        *head,
        fmt.rate_text(prediction.throughput),
        band_text(prediction),
        fmt.ms_text(prediction.step_ms),
        fmt.ratio_text(prediction.over_fp32),
        fmt.ratio_text(prediction.over_tf32),
        memory,
        fmt.MISSING if prediction.largest_batch is None else fmt.count_text(prediction.largest_batch),
    )


def compare_details(sheet: CompareSheet, console: Console) -> None:
    """Print the details of a comparison; the predictions for real GPUs are last."""
    bodies.compare_details(sheet, console)
    predicted = real_gpus_sheet(sheet.real_gpus)
    if predicted is None:
        return
    if not predicted.table.rows:
        console.print(Text(f"\n{predicted.title}", style="bold"))
        console.print(Text(f"  {predicted.caption}"))
        return
    gpus = ["", *(gpu for gpu, *_ in predicted.table.rows)]
    rows = [
        ("" if gpu == last else gpu, *cells) for last, (gpu, *cells) in zip(gpus, predicted.table.rows, strict=False)
    ]
    terminal.section(console, predicted.title, terminal.grid_table(replace(predicted.table, rows=rows)))
    console.print(Text(predicted.caption, style="dim"))
