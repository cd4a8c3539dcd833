"""What predictions assume, with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.measure.predict.sharding import GpuGroup
    from mezzo.records import Reason


def assumptions(channels_last: bool, own_layout: bool | None, job: GpuGroup, *, only_options: bool) -> list[Reason]:
    """Return what every prediction assumes.

    Args:
        channels_last: whether predictions are for channels-last images.
        own_layout: whether the traced script or model stores images channels-last; None if it has no images.
        job: how many GPUs train together.
        only_options: whether only the options decide the layout.
    """
    from mezzo.measure.predict.memory.of_tape import DRIVER_BYTES
    from mezzo.records import Reason

    default = "--channels-last was not given" if only_options else "as the script stores its images"
    faster = "" if channels_last else "; 16-bit convolutions are faster with --channels-last"
    why = "requested by --channels-last" if channels_last and (only_options or not own_layout) else default + faster
    layout = Reason(what="layout", value="channels-last" if channels_last else "channels-first", reason=why)
    return [
        *([] if own_layout is None else [layout]),
        Reason(
            what="fp32 and tf32",
            value="all products in one of them",
            reason="torch's default is convolutions in TF32 and matrix products in FP32, which is between the two",
        ),
        Reason(what="input pipeline", value="keeps up", reason="its time is not predicted"),
        Reason(
            what="driver and context",
            value=f"{DRIVER_BYTES >> 20} MiB",
            reason="it depends on the driver; of cuDNN's workspaces, only copies of channels-first operands are counted",
        ),
        _sharing(job),
    ]


def _sharing(job: GpuGroup) -> Reason:
    from mezzo.measure.predict.sharding import LINK_SHARE
    from mezzo.records import Reason

    if job.num_gpus == 1:
        return Reason(what="step", value="eager, one GPU", reason="torch.compile is not predicted")
    return Reason(
        what="step",
        value=f"eager, {job.num_gpus} GPUs of one machine, {job.shard}",
        reason=f"links reach {LINK_SHARE:.0%} of their speed, an assumption: no measured job confirms it",
    )
