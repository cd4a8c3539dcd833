"""The plots of a record in reading order, each with a caption that explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import CompareRecord, Memory, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report import sampling, sheets
from mezzo.report.bars import Timed, memory_figure, time_figure
from mezzo.report.curves import loss_figure, scale_figure
from mezzo.report.plotting import POLICY_COLOURS, Figure, policy_colours


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot with its heading and caption; no figure if there is nothing to draw."""

    name: str
    title: str
    caption: str
    figure: Figure | None


def compare_plots(record: CompareRecord) -> list[Plot]:
    """Return the plots of a comparison in reading order."""
    timed = [_timed(record, row.policy_shown, emulated=row.emulated) for row in record.rows]
    memory = {row.policy_shown: row.memory for row in record.rows}
    colours = compare_colours(record)
    return _plots(record.runs, memory=memory, timed=timed, colours=colours)


def run_plots(record: RunRecord) -> list[Plot]:
    """Return the plots of one run."""
    emulated = record.effective.emulated
    timed = Timed(policy=record.policy_shown, times_ms=record.steps.time_ms, emulated=emulated)
    colours = {record.policy_shown: POLICY_COLOURS[1]}
    memory = {record.policy_shown: record.memory}
    return _plots([record], memory=memory, timed=[timed], colours=colours)


def compare_colours(record: CompareRecord) -> dict[str, str]:
    """Return the colour of each policy of a comparison."""
    named = [row.policy_shown for row in record.rows] + [run.policy_shown for run in record.runs]
    return policy_colours(list(dict.fromkeys(named)))


def _timed(record: CompareRecord, policy: str, *, emulated: bool) -> Timed:
    runs = [run for run in record.runs if run.policy_shown == policy]
    times = [time for run in runs for time in run.steps.time_ms]
    return Timed(policy=policy, times_ms=times, emulated=emulated)


def _plots(
    runs: Sequence[RunRecord],
    *,
    memory: Mapping[str, Memory],
    timed: Sequence[Timed],
    colours: Mapping[str, str],
) -> list[Plot]:
    order = list(colours)
    in_order = sorted(runs, key=lambda run: order.index(run.policy_shown))
    scale = scale_figure(in_order, colours=colours)
    bars = memory_figure(memory)
    times = time_figure(timed, colours=colours)
    return [
        *_loss_plots(in_order, colours=colours),
        Plot(name="scale", title="Loss scale and skipped steps", caption=_scale_caption(scale), figure=scale),
        Plot(name="memory", title="Memory of a step, by kind", caption=_memory_caption(bars), figure=bars),
        Plot(name="times", title="Time a step", caption=_time_caption(timed, times), figure=times),
    ]


def _loss_plots(runs: Sequence[RunRecord], *, colours: Mapping[str, str]) -> list[Plot]:
    """Return a plot of the loss, or one of each loss if a script has several."""
    names = list(dict.fromkeys(loss.name for run in runs for loss in run.steps.losses))
    if not names:
        figure = loss_figure(runs, colours=colours)
        return [Plot(name="loss", title="Loss", caption=_loss_caption(runs, figure), figure=figure)]
    drawn = [(name, loss_figure(runs, colours=colours, name=name)) for name in names]
    return [
        Plot(
            name=f"loss{number}",
            title=f"L{fmt.loss_title(name)[1:]}",
            caption=_loss_caption(runs, figure),
            figure=figure,
        )
        for number, (name, figure) in enumerate(drawn, start=1)
    ]


def _loss_caption(runs: Sequence[RunRecord], figure: Figure | None) -> str:
    if figure is None:
        return "No run recorded a loss."
    parts = []
    if figure["layout"]["showlegend"]:
        parts.append("One line a run; a click on a policy hides or shows its runs.")
    if any(sampling.broken_stretches(run.steps.loss) for run in runs):
        parts.append("A cross marks where a loss stopped being finite.")
    if "range" in figure["layout"]["yaxis"]:
        parts.append("Lines may leave the frame; a double click shows all of them.")
    return " ".join(parts)


def _scale_caption(figure: Figure | None) -> str:
    if figure is None:
        return "No loss scale was used."
    return "A triangle marks a skipped step: its gradients were not finite, so the update was left out."


def _memory_caption(figure: Figure | None) -> str:
    if figure is None:
        return "Memory was not measured."
    return "Activations are what the forward pass keeps for the backward pass, cast copies of weights included."


def _time_caption(timed: Sequence[Timed], figure: Figure | None) -> str:
    if figure is not None:
        return "A box holds the middle half of all steps, its line is the median, the whiskers span 5% to 95%."
    if any(t.emulated for t in timed):
        return f"Not drawn; {sheets.NOT_FOR_GPU}."
    return "No step was timed."
