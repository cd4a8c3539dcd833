"""Run PyTorch code that knows nothing of Mezzo under a policy: every patch of torch is made here and undone here."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.utils.checkpoint

from mezzo.diagnosis.settings import AnySettings
from mezzo.diagnosis.watching import Watched
from mezzo.launch.backward import BackwardPasses
from mezzo.launch.diagnosis import diagnosis_for
from mezzo.launch.forward import Regions
from mezzo.launch.own_amp import take_over
from mezzo.launch.patches import Patches
from mezzo.launch.run import Run
from mezzo.launch.seeds import shift_seeds
from mezzo.launch.updates import Updates
from mezzo.launch.watch import CloseLook
from mezzo.policy import Policy


@contextmanager
def switched(
    policy: Policy | None, *, seed: int | None = None, diagnosis: AnySettings | None = None
) -> Iterator[tuple[Run, CloseLook]]:
    """Run the code inside under ``policy`` (None: its own precision) and take down every training step.

    Args:
        policy: what to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        diagnosis: what to watch for, in ``run.diagnosis``; the close look at formats and bytes is then not taken.
    """
    run, patches = Run(policy), Patches()
    regions = Regions(run)
    look = CloseLook(run, in_region=regions.covered)
    try:
        if seed is not None:
            shift_seeds(seed, patches)
        if policy is not None and policy.casting == "none":
            _set_tf32(policy, patches)
        take_over(run, patches)
        regions.install(patches)
        BackwardPasses(run).install(patches)
        Updates(run).install(patches)
        if diagnosis is None:
            look.install(patches)
        else:  # one observer at a time: two would have to leave the stack of dispatch modes in the reverse order
            run.diagnosis = diagnosis_for(diagnosis, run)
            run.watchers.append(run.diagnosis)
            run.diagnosis.start()
            patches.on_undo(run.diagnosis.close)
        _keep_autocast(patches)
        with warnings.catch_warnings():
            # Our hooks skip what torch.compile traces and count depth, so firing once more for the wrapper is harmless.
            warnings.filterwarnings("ignore", message=".*there are global hooks on modules.*")
            yield run, look
        with suppress(Watched):
            run.close_update()
    finally:
        patches.undo()


def _keep_autocast(patches: Patches) -> None:
    """Put autocast's state back at the end: code that torch.compile failed to compile leaves it as it was in the middle."""
    for device_type in ("cpu", "cuda"):
        patches.on_undo(
            functools.partial(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
        )


def _set_tf32(policy: Policy, patches: Patches) -> None:
    # Convolutions compute in TF32 by default where the GPU has it: FP32 has to be asked for.
    precision = "tf32" if policy.compute == "tf32" else "ieee"
    if torch.cuda.is_available():
        patches.replace(torch.backends.cuda.matmul, "fp32_precision", precision)
        patches.replace(torch.backends.cudnn.conv, "fp32_precision", precision)  # type: ignore[attr-defined]
