"""What does Mezzo cost inside Lightning and Accelerate, beside their own mixed precision?

Both sides run the same loop of the same library with the CPU's own 16-bit kernels; they differ only in the mixed precision. CPU times
include creating the trainer and the model, which is less than a tenth. Accelerate silently uses no loss scale on a CPU, so for FP16 the
benchmark gives it a GradScaler.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import logging
import pstats
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.models import mlp

ROUNDS, STEPS, LR = 11, 100, 1e-4
Loop = Callable[[int], None]
"""Trains for a number of steps."""


def _batches(steps: int) -> torch.utils.data.DataLoader[Any]:
    torch.manual_seed(1)
    batch = torch.randn(32, 64), torch.randn(32, 64)
    return torch.utils.data.DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]


def trainer(plugin: Callable[[], Any], clip: float | None) -> Loop:
    """Return a fit of Lightning's Trainer without logger, checkpoints and progress bar."""
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()[0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    def run(steps: int) -> None:
        off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        fit = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=plugin(), gradient_clip_val=clip, enable_model_summary=False, **off
        )
        fit.fit(Regression(), _batches(steps))

    return run


def fabric(plugin: Callable[[], Any], clip: float | None) -> Loop:
    from lightning.fabric import Fabric

    def run(steps: int) -> None:
        made = Fabric(accelerator="cpu", devices=1, plugins=plugin())
        bare = mlp()[0]
        model, optimizer = made.setup(bare, torch.optim.AdamW(bare.parameters(), lr=LR))
        for inputs, targets in _batches(steps):
            loss = F.mse_loss(model(inputs), targets)
            made.backward(loss)
            if clip:
                made.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()

    return run


def accelerate(accelerator: Callable[[], Any], clip: float | None) -> Loop:
    def run(steps: int) -> None:
        made = accelerator()
        model = mlp()[0]
        model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        for inputs, targets in _batches(steps):
            loss = F.mse_loss(model(inputs), targets)
            made.backward(loss)
            if clip:
                made.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    return run


def accelerators(precision: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that create Accelerate's own accelerator and Mezzo's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from mezzo.compat.accelerate import MezzoAccelerator

    def own() -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        made = Accelerator(cpu=True, mixed_precision=precision)
        if precision == "fp16":
            made.scaler, made.native_amp = torch.amp.GradScaler("cpu"), True
        return made

    def ours() -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return MezzoAccelerator(cpu=True, policy=f"{precision}:op_lists=device")

    return own, ours


def pairs(precision: str, clip: float | None) -> Iterator[tuple[str, Loop, Loop]]:
    """Yield the name of every library, its loop with its own mixed precision, and its loop with Mezzo's."""
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
    from lightning.pytorch.plugins.precision import MixedPrecision as TrainerMixed

    from mezzo.compat.lightning import MezzoFabricPrecision, MezzoPrecision

    mixed: Any = "16-mixed" if precision == "fp16" else "bf16-mixed"
    policy = f"{precision}:op_lists=device"
    yield (
        "Lightning Trainer",
        trainer(lambda: TrainerMixed(mixed, "cpu"), clip),
        trainer(lambda: MezzoPrecision(policy), clip),
    )
    yield (
        "Lightning Fabric",
        fabric(lambda: FabricMixed(mixed, "cpu"), clip),
        fabric(lambda: MezzoFabricPrecision(policy), clip),
    )
    own, ours = accelerators(precision)
    yield "Accelerate", accelerate(own, clip), accelerate(ours, clip)


def calls_a_step(run: Loop) -> float:
    """Return the Python and C calls of one step: the difference that twice as many steps make, so that start and end do not count."""
    run(3)
    totals = []
    for steps in (STEPS, 2 * STEPS):
        watch = cProfile.Profile()
        watch.runcall(run, steps)
        totals.append(pstats.Stats(watch).total_calls)  # type: ignore[attr-defined]
    return float(totals[1] - totals[0]) / STEPS


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    rows, data = [], {}
    for precision in ("fp16", "bf16"):
        for clip in (None, 1.0):
            for library, own, ours in pairs(precision, clip):
                what = f"{library}, {precision}{', clipping' if clip else ''}"
                with quiet():
                    calls, own_calls = calls_a_step(ours), calls_a_step(own)
                    pieces = {"mezzo": lambda run=ours: run(STEPS), "own": lambda run=own: run(STEPS)}
                    times = interleave(pieces, rounds=ROUNDS)
                text = f"{calls / own_calls:.3f}x ({calls:.0f} and {own_calls:.0f})"
                rows.append((f"{what}: Python calls a step against its own", text, "1.0 or less"))
                # Without a scale and without clipping the library computes no gradient norm; a session does, for its record.
                target = "1.0 or less" if precision == "fp16" or clip else "(takes the gradient norm)"
                rows.append(
                    (
                        f"{what}: thread CPU time of {STEPS} steps and set-up",
                        spread(ratio(times, "mezzo", "own")),
                        target,
                    )
                )
                data[what] = {"calls": {"mezzo": calls, "own": own_calls}, "median_ms": median_ms(times)}
    report("trainers", rows, data)
