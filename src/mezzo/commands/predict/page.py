"""What a prediction says: one line for each GPU and policy, the verdict last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from mezzo.records import LoaderRate, Note, Prediction, PredictionDetail, PredictRecord, RealGpus, Row
from mezzo.records.run import BATCH
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts.predicted import predict_charts
from mezzo.report.commands import TypedScript, best_first
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import (
    Cell,
    Charts,
    Code,
    Fact,
    FactTable,
    Grid,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    facts_section,
)

REAL_GPUS = "On a real GPU: predicted, not measured"


def page(record: PredictRecord) -> Page:
    """Return what ``record`` says."""
    impossible = dict.fromkeys(verdict_text(one) for one in record.predictions if not one.possible)
    memory = "Memory: allocated by tensors / reserved by torch's allocator / on the device."
    slurm = Code(text=fmt.clean("\n".join(record.slurm), keep_lines=True), copies="Copy the lines")
    return Page(
        title=f"{_model(record)}: prediction",
        script=fmt.clean(record.model),
        answer=_answer(record),
        sections=[
            Charts(draw=lambda _: predict_charts(record)),
            Section(
                title="By GPU and policy",
                blocks=[
                    _grid(record),
                    Paragraph(text=" ".join(_limits(record)), faint=True),
                    Paragraph(text=" ".join(impossible), faint=True),
                    Paragraph(text=" ".join(_not_validated(record)), faint=True),
                ],
            ),
            Section(title="For Slurm", blocks=[slurm]),
            facts_section("Does it fit?", _fit(record), details=True),
            Section(
                title="Memory and worth", blocks=[_worth(record), Paragraph(text=memory, faint=True)], details=True
            ),
            *(
                Section(
                    title=f"Where the time and the memory go on {fmt.clean(one.gpu)} in {policy_and_plan(one)}",
                    blocks=[FactTable(rows=_modules(one)), FactTable(rows=_kinds(one))],
                    shown_in="page",
                    folded=True,
                )
                for one in record.predictions
                if one.modules
            ),
            facts_section("Assumed", pages.facts(record.assumptions), details=True),
        ],
        steps=best_first(NextStep(why=fmt.clean(why), command=command) for why, command in _next(record)),
        environment=pages.environment_facts(record.environment),
        command=pages.command_text(record.command, record.environment),
    )


def _answer(record: PredictRecord) -> Headline:
    """Return the fastest GPU that the batch fits."""
    best, facts = record.best, []
    detail = (
        f"Input: {fmt.clean(record.input)}. Optimizer: {fmt.clean(record.optimizer)}{_job(record)}. "
        f"Predicted, not measured. {_band(record)}"
    )
    if best is not None:
        memory = fmt.clean(best.no_memory) or _fitting(best) or f"{fmt.bytes_text(best.allocated_bytes)} allocated"
        over_tf32 = f"over TF32 {fmt.ratio_text(best.over_tf32)}"
        facts = [
            Fact(what=f"{fmt.clean(record.unit)}/s", value=fmt.rate_text(best.throughput), reason=band_text(best)),
            Fact(what="memory, device", value=_device_memory(best), reason=memory),
            Fact(what="over FP32", value=fmt.ratio_text(best.over_fp32), reason=over_tf32),
        ]
        if best.largest_batch is not None:
            fits = f"fits into {1 - record.headroom:.0%} of the memory"
            why = {"data set": "all samples of the data set", "measured": "no measured batch is larger"}
            reason = why.get(best.largest_limit, fits)
            facts.append(Fact(what="largest batch", value=largest_text(best), reason=reason))
        if record.loader is not None and record.loader.samples_per_s is not None:
            value = f"{_delivered(record.loader)} {fmt.clean(record.unit)}/s"
            limits = "it limits: " if best.slower == "loader" else ""
            facts.append(Fact(what="loader", value=value, reason=f"{limits}on this machine, {_workers(record.loader)}"))
    tone, word = ("bad", "does not fit") if best is None else ("quiet", "predicted")
    return Headline(tone=tone, word=word, sentence=_headline(record), detail=detail, facts=facts)


def _fitting(best: Prediction) -> str:
    """Return how much memory stays free if the batch fits; empty if the memory is not known."""
    if not best.fits or not best.gpu_bytes:
        return ""
    return f"fits: {1 - best.device_bytes / best.gpu_bytes:.0%} of {fmt.bytes_text(best.gpu_bytes)} stays free"


def _device_memory(prediction: Prediction) -> str:
    return fmt.MISSING if prediction.no_memory else fmt.bytes_text(prediction.device_bytes)


def _band(record: PredictRecord) -> str:
    if all(prediction.gpu == "cpu" for prediction in record.predictions):
        return (
            "The band comes from the trainings that calibrated this machine; no largest batch is predicted for a CPU."
        )
    measured = (
        "; rates measured on this machine have bands of their own"
        if any(prediction.calibrated for prediction in record.predictions)
        else ""
    )
    fits = f"; the largest batch fits into {1 - record.headroom:.0%} of the memory"
    no_memory = any(prediction.no_memory for prediction in record.predictions)
    return (
        f"Each band contains 8 of 10 measured trainings on GPU architectures that were left out of the fit{measured}"
        f"{'' if no_memory else fits}."
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
        f"about {fmt.rate_text(best.throughput)} {fmt.clean(record.unit)}/s{_condition(best, record)}"
    )


def _condition(best: Prediction, record: PredictRecord) -> str:
    """Return what has to keep up with the GPU; empty if nothing is known to be slower."""
    if best.slower == "copies":
        return " if its inputs are on the GPU already"
    if best.slower != "loader" or record.loader is None:
        return ""
    return f" if the loader keeps up, which delivers {_delivered(record.loader)} on this machine"


def _delivered(loader: LoaderRate) -> str:
    """Return a loader's rate."""
    rate = fmt.rate_text(loader.samples_per_s or 0.0)
    return f"less than {rate}" if loader.is_bound else rate


def _workers(loader: LoaderRate) -> str:
    return f"{loader.workers} worker{'' if loader.workers == 1 else 's'}" if loader.workers else "no workers"


def _limits(record: PredictRecord) -> Iterator[str]:
    """Yield sentences on what is slower than the GPU, and on largest batches that memory does not end."""
    possible, unit = [one for one in record.predictions if one.possible], fmt.clean(record.unit)
    loader, data = record.loader, record.data
    cost = " and costs" if any(one.cost_per_million is not None for one in possible) else ""
    if data is not None and data.samples is not None and record.batch > data.samples:
        yield f"Batch {record.batch} is more than the data set has: the loader yields {data.samples:,} samples at most."
    if loader is not None and any(one.slower == "loader" for one in possible):
        each = " for each GPU" if record.gpus_per_job > 1 else ""
        yield (
            f"Bound by loader: the script's loader delivers {_delivered(loader)} {unit}/s{each} on this machine "
            f"with {_workers(loader)}, less than the GPU would train on; {unit}/s{cost} are the GPU's."
        )
    elif loader is not None and loader.reason:
        yield f"The script's loader was not timed: {fmt.clean(loader.reason)}."
    if waiting := [one for one in possible if one.bounds.get("launch") == 1 and one.captured_ms]:
        best = min(waiting, key=lambda one: one.captured_ms)
        yield (
            f"Bound by launch: the host needs longer for the step's operations than the GPU. Captured as a CUDA graph, the step takes "
            f"{fmt.ms_text(best.captured_ms)} on {fmt.clean(best.gpu)} in {policy_and_plan(best)}, not {fmt.ms_text(best.step_ms)}."
        )
    if any(one.slower == "copies" for one in possible):
        yield f"Bound by copies: the link to the host moves the inputs slower than the GPU trains; {unit}/s are the GPU's."
    kinds = {one.largest_limit for one in possible if one.largest_batch is not None}
    if "data set" in kinds and data is not None and data.samples is not None:
        yield f"(all): the batch is limited to the data set of {data.samples:,} samples, not by memory."
    if "measured" in kinds:
        yield "over: larger batches fit as well, but no measurement that predictions were compared with has one."


_WHY_NOT = {
    "measurements": "for want of measurements",
    "host": "as no measured step is bound by the host",
    "batch": "as no measured convolutional network has a batch below 32",
}


def _not_validated(record: PredictRecord) -> Iterator[str]:
    """Yield a sentence for each reason that no measurement vouches for rows, with the rows."""
    rows: dict[str, list[str]] = {}
    for one in record.predictions:
        if one.possible and (reason := _why_not(one)):
            rows.setdefault(reason, []).append(f"{fmt.clean(one.gpu)} in {policy_and_plan(one)}")
    for reason, named in rows.items():
        yield f"Not validated, {reason}: {fmt.listed(list(dict.fromkeys(named)))}."


def _why_not(prediction: Prediction) -> str:
    """Return why no measurement vouches for a prediction; empty if one does, or this machine's rates do."""
    kind = prediction.not_validated or ("" if prediction.validated else "measurements")
    return "" if prediction.calibrated and kind == "measurements" else _WHY_NOT.get(kind, "")


def _fit(record: PredictRecord) -> list[Fact]:
    """Return a line for each GPU: whether the record's batch fits, by policy, with the share of the memory that it leaves free."""
    by_gpu: dict[str, list[Prediction]] = {}
    for prediction in record.predictions:
        if prediction.possible and not prediction.no_memory:
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
    largest = "" if prediction.largest_batch is None else f", batch up to {largest_text(prediction)}"
    return f"{fmt.bytes_text(prediction.device_bytes)}{left}{largest}"


def _grid(record: PredictRecord) -> Grid:
    """Return a row for each GPU and policy: speed, memory and what bounds the step."""
    unit = fmt.clean(record.unit)
    has_cost = any(prediction.cost_per_million is not None for prediction in record.predictions)
    cost = (f"cost per million {unit}",) if has_cost else ()
    numbers = (f"{unit}/s", "10% to 90%", "step", "memory", "largest batch", "over FP32", *cost)
    heads = ("GPU", "policy", *numbers, "bound by")
    rows = [_row(prediction, has_cost=has_cost) for prediction in record.predictions]
    return Grid(heads=heads, rows=rows, numbers=range(2, len(heads) - 1), whole=(0, 3), wide=True, grouped=True)


def _row(prediction: Prediction, *, has_cost: bool) -> tuple[str | Cell, ...]:
    card = "" if prediction.gpu_bytes is None else fmt.bytes_text(prediction.gpu_bytes)
    head = (Cell(text=fmt.clean(prediction.gpu), below=(card,)), policy_and_plan(prediction))
    if not prediction.possible:
        return (*head, *[fmt.MISSING] * (8 if has_cost else 7))
    cost = (
        fmt.MISSING if prediction.cost_per_million is None else fmt.number_text(prediction.cost_per_million, digits=3)
    )
    return (
        *head,
        fmt.rate_text(prediction.throughput),
        band_text(prediction),
        fmt.ms_text(prediction.step_ms),
        _device_memory(prediction) + (", too much" if prediction.fits is False else ""),
        largest_text(prediction),
        fmt.ratio_text(prediction.over_fp32),
        *([cost] if has_cost else []),
        _bound(prediction),
    )


def _bound(prediction: Prediction) -> str:
    """Return what bounds the training: what cannot keep up with the GPU, else what most of the step waits for."""
    kind = max(prediction.bounds, key=lambda kind: prediction.bounds[kind], default="")
    return prediction.slower or (f"{kind} {fmt.share_text(prediction.bounds[kind])}" if kind else fmt.MISSING)


def largest_text(prediction: Prediction) -> str:
    """Return the largest batch, marked where memory is not what ends it."""
    if prediction.largest_batch is None:
        return fmt.MISSING
    count = fmt.count_text(prediction.largest_batch)
    return {"data set": f"{count} (all)", "measured": f"over {count}"}.get(prediction.largest_limit, count)


def _worth(record: PredictRecord) -> FactTable:
    """Return all kinds of memory, and whether a policy is worth it."""
    rows = []
    for one in record.predictions:
        sizes = (one.allocated_bytes, one.reserved_bytes, one.device_bytes)
        value = " / ".join(map(fmt.bytes_text, sizes)) if one.possible and not one.no_memory else fmt.MISSING
        what = f"{fmt.clean(one.gpu)}, {policy_and_plan(one)}"
        rows.append(Fact(what=what, value=value, reason=verdict_text(one, _trade(one, record))))
    return FactTable(rows=rows, heads=("", "allocated / reserved / device", "is it worth it?"))


def _modules(prediction: Prediction) -> list[Fact]:
    return [
        Fact(what=fmt.clean(one.module), value=fmt.share_text(one.share), reason=f"mostly {one.bound}")
        for one in prediction.modules
    ]


def _kinds(prediction: Prediction) -> list[Fact]:
    return [Fact(what=kind, value=fmt.bytes_text(size)) for kind, size in sorted(prediction.memory_bytes.items())]


def band_text(prediction: Prediction) -> str:
    """Return the error band of the throughput."""
    return f"{fmt.rate_text(prediction.throughput_low)} to {fmt.rate_text(prediction.throughput_high)}"


def verdict_text(prediction: Prediction, trade: str = "") -> str:
    """Return whether the policy is worth it on its GPU, or else the ``trade`` of checkpointing, and what limits the prediction."""
    if not prediction.possible:
        return f"{fmt.clean(prediction.reason)}."
    why_not = _why_not(prediction)
    notes = [
        "Does not fit." if prediction.fits is False else "",
        trade or prediction.verdict,
        f"{prediction.reason}." if prediction.reason else "",
        "The rates were measured on this machine; the band comes from its calibration."
        if prediction.calibrated
        else "",
        f"Not validated, {why_not}." if why_not else "",
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


def off_text(predicted: float, measured: float, *, high: str, low: str) -> str:
    """Return how far a prediction is off: ``24% off, too fast``; ``high`` and ``low`` name the two directions."""
    error = predicted / measured - 1
    share = f"{abs(error):.0%} off"
    return share if share.startswith("0%") else f"{share}, {high if error > 0 else low}"


def beside_text(predicted_ms: float, measured_ms: float) -> str:
    """Return a predicted and a measured step, and how far the prediction is off."""
    off = off_text(predicted_ms, measured_ms, high="too slow", low="too fast")
    return f"predicted {fmt.ms_text(predicted_ms)}, measured {fmt.ms_text(measured_ms)}: {off}"


def beside(predicted: RealGpus | None, rows: Sequence[Row]) -> list[Note]:
    """Return each prediction for the device of the runs beside what its row measured there.

    Args:
        predicted: the predictions; None if none were requested.
        rows: what was measured; emulated rows have no time and no memory of their own.
    """
    if predicted is None:
        return []
    found = []
    measured = {row.policy_shown: row for row in rows if not row.emulated}
    on_gpu = [one for one in predicted.predictions if one.possible and one.gpu == predicted.own_gpu]
    for one in [predicted.here] if predicted.here is not None else on_gpu:
        row = measured.get(one.policy)
        if row is None or row.step_ms is None:
            continue
        peak = row.memory.cuda_allocated_bytes
        memory = "by the clock: whatever else ran on this machine counts" if one.gpu == "cpu" else ""
        if peak and not row.memory.of_emulation:
            off = off_text(one.allocated_bytes, peak, high="too much", low="too little")
            memory = (
                f"allocated: predicted {fmt.bytes_text(one.allocated_bytes)}, measured {fmt.bytes_text(peak)}: {off}"
            )
        found.append(Note(what=f"{one.gpu}, {one.policy}", value=beside_text(one.step_ms, row.step_ms), reason=memory))
    return found


def real_gpus_sections(predicted: RealGpus | None, rows: Sequence[Row]) -> list[Section]:
    """Return the predictions and what they rest on, or the reason why there are none; empty if none was requested.

    Args:
        predicted: the predictions.
        rows: what was measured.
    """
    if predicted is None:
        return []
    left_out = pages.facts(predicted.not_predicted)
    if predicted.reason:
        why = Paragraph(text=f"Not predicted: {fmt.clean(predicted.reason)}.")
        return [
            Section(title=REAL_GPUS, blocks=[why], details=True),
            Section(title="Not predicted", blocks=[FactTable(rows=left_out)], shown_in="page", folded=True),
        ]
    verdicts = [
        Fact(what=f"{fmt.clean(prediction.gpu)}, {fmt.clean(prediction.policy)}", value=verdict_text(prediction))
        for prediction in predicted.predictions
    ]
    return [
        Section(
            title=REAL_GPUS,
            blocks=[_real_gpus(predicted), Paragraph(text=_traced(predicted), faint=True)],
            details=True,
        ),
        facts_section("Predicted and measured here", pages.facts(beside(predicted, rows)), details=True),
        Section(title="Is it worth it?", blocks=[FactTable(rows=[*verdicts, *left_out])], shown_in="page", folded=True),
        Section(
            title="Assumed", blocks=[FactTable(rows=pages.facts(predicted.assumptions))], shown_in="page", folded=True
        ),
    ]


_WITHOUT_NUMBERS = "A step was traced on this machine without computing its numbers, and"


def _traced(predicted: RealGpus) -> str:
    """Return how the predictions were made."""
    of_batch = "" if predicted.unit == "steps" else f"Batch {predicted.batch} of this script. "
    possible = [prediction for prediction in predicted.predictions if prediction.possible]
    fits = " A batch that does not fit is marked." if any(one.fits is False for one in possible) else ""
    how = "The operations of one real step on this machine were" if predicted.observed else _WITHOUT_NUMBERS
    unknown = [one.no_memory for one in possible if one.no_memory]
    memory = f"No memory: {fmt.clean(unknown[0])}." if unknown else f"Memory is what nvidia-smi would show.{fits}"
    return (
        f"{of_batch}{how} timed by formulas that are calibrated on public measurements (docs/predict.md); "
        f"each band contains 8 of 10 measured trainings. {memory}"
    )


def _real_gpus(predicted: RealGpus) -> Grid:
    unit = fmt.clean(predicted.unit)
    heads = ("GPU", "policy", f"{unit}/s", "10% to 90%", "step", "over FP32", "over TF32", "memory", "largest batch")
    rows = [_real_gpu(one) for one in predicted.predictions]
    return Grid(heads=heads, rows=rows, numbers=range(2, len(heads)), grouped=True)


def _real_gpu(prediction: Prediction) -> tuple[str, ...]:
    head = fmt.clean(prediction.gpu), fmt.clean(prediction.policy)
    if not prediction.possible:
        return (*head, *[fmt.MISSING] * 7)
    memory = _device_memory(prediction) + (" (does not fit)" if prediction.fits is False else "")
    return (
        *head,
        fmt.rate_text(prediction.throughput),
        band_text(prediction),
        fmt.ms_text(prediction.step_ms),
        fmt.ratio_text(prediction.over_fp32),
        fmt.ratio_text(prediction.over_tf32),
        memory,
        largest_text(prediction),
    )


_SPARE = 0.13
"""Share of a GPU's memory to leave free for errors of the prediction."""
_MIN_GIB = 0.1
_MUCH = 0.5
"""Above this share of a GPU's memory, checkpointing is worth a slower step."""


def _next(record: PredictRecord) -> Iterator[tuple[str, str]]:
    """Yield reasons and commands to type after a prediction for a script; nothing for a model by name."""
    script = TypedScript.typed(record.command, record.model)
    if script is None:  # a model by name
        return
    arguments = tuple(word.replace(BATCH, str(record.batch)) for word in script.arguments)
    script = replace(script, arguments=arguments, variables=record.environment.variables)
    best = record.best
    if best is not None:
        where = {} if best.gpu == "cpu" else {"gpu": best.gpu}
        why = f"see which policy trains like fp32, answered for {best.gpu if where else 'this machine'}"
        yield why, script.under("check", **where, **_policies(script))
    tight = [
        prediction
        for prediction in record.predictions
        if prediction.possible and prediction.fits is False and prediction.gpu != "cpu"
    ]
    budgets = [(prediction, kept) for prediction in tight if (kept := _left_for_activations(prediction)) is not None]
    if budgets:
        prediction, kept = max(budgets, key=lambda pair: pair[0].throughput)
        why = f"it does not fit on {prediction.gpu} in {prediction.policy}; keep less for the backward pass"
        yield why, script.under("run", policy=prediction.policy, checkpoint=kept)
    elif best is not None and best.device_bytes > _MUCH * (best.gpu_bytes or 0):
        why = "see what checkpointing costs and saves on this machine, with the same batch"
        yield why, script.under("compare", policies=best.policy, checkpoint="full")


def _policies(script: TypedScript) -> dict[str, str]:
    """Return the policies as typed, if a check can compare any of them with FP32."""
    typed = script.options.get("--policies", ("",))[-1]
    return {"policies": typed} if {name.strip() for name in typed.split(",")} - {"", "fp32"} else {}


def _left_for_activations(prediction: Prediction) -> str | None:
    """Return how much may be kept for the backward pass if all else is as predicted; None if no memory is left for that."""
    kept = prediction.memory_bytes.get("activations", 0)
    if prediction.gpu_bytes is None or not kept:
        return None
    left = prediction.gpu_bytes * (1 - _SPARE) - (prediction.device_bytes - kept)
    gib = left / 2**30
    return None if gib < _MIN_GIB else f"{gib:.2g}GiB" if gib < 10 else f"{int(gib)}GiB"


def log_entry(record: PredictRecord) -> LogEntry:
    """Return what is logged of the record."""
    return plain_entry(record)
