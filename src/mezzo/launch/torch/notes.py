"""Who is notified of what a run does, and the notes of what it left as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mezzo.devices import lacks_cuda
from mezzo.launch.torch.cuda_stand_in import CudaStandIn
from mezzo.observe.observer import Observer
from mezzo.records import Note

if TYPE_CHECKING:
    from mezzo.observe.contracts.watch import ContractWatch

_OWN_AMP_OFF = Note(
    what="own autocast",
    value="the script's autocast is off",
    reason="it is for CUDA, which this machine does not have, so the script trains in FP32",
)


class RunNotes:
    """What the policy left alone, with reasons, and what this machine does otherwise than the script says."""

    def __init__(self) -> None:
        self.left_alone: dict[str, Note] = {}
        self.session_policy = ""
        """The policy of the script's own ``mezzo.Session``, if the run leaves it alone."""
        self.stand_in = CudaStandIn() if lacks_cuda() else None
        """The CPU in place of CUDA; None if this machine has CUDA."""
        self.own_16_bits = ""
        """The module whose weights the script itself keeps in 16 bits; empty if there is none."""
        self._own_amp_off = False
        self._measured: list[Callable[[], list[Note]]] = []

    def note_left_alone(self, what: str, value: str, reason: str) -> None:
        """Record something that the policy left alone."""
        self.left_alone.setdefault(f"{what} {value}", Note(what=what, value=value, reason=reason))

    def note_own_16_bits(self, where: str) -> None:
        """Record the module whose weights the script itself keeps in 16 bits."""
        self.own_16_bits = self.own_16_bits or where
        self.note_left_alone("16-bit weights", where, "the script itself keeps its weights in 16 bits")

    def forget(self, noted: str) -> None:
        """Record that something was not left alone after all; ``noted`` is what and value of the note."""
        self.left_alone.pop(noted, None)

    def note_session(self, policy: str) -> None:
        """Record the policy of the script's own session, of the first one if it builds several."""
        self.session_policy = self.session_policy or policy

    def note_own_amp_off(self) -> None:
        """Note that torch leaves the script's autocast off, for want of a CUDA device, and say so the first time."""
        if not self._own_amp_off:
            self._own_amp_off = True
            print(
                f"mezzo: {_OWN_AMP_OFF.value}: {_OWN_AMP_OFF.reason}; --policy fp16 computes as a GPU would",
                file=sys.stderr,
            )

    def add_measurement(self, measured: Callable[[], list[Note]]) -> None:
        """Ask ``measured`` at the end of the run what it measured of the policy's effects."""
        self._measured.append(measured)

    def explanation(self) -> list[Note]:
        """Return what this machine does otherwise than the script says, and what was measured, with reasons."""
        return [
            *(self.stand_in.explanation() if self.stand_in is not None else []),
            *([_OWN_AMP_OFF] if self._own_amp_off else []),
            *(reason for measured in self._measured for reason in measured()),
        ]


class Listeners:
    """The observer of a run, and everything else that is notified of its passes and updates."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.observer: Observer | None = None
        self.retired: Observer | None = None
        """An observer that has seen all its steps, while the script goes on: only its record is asked for."""
        self.contract: ContractWatch | None = None
        """The watch of the formats that a contract expects; None without one."""
        self._build: Callable[[], Observer] | None = None

    def observe(self, build: Callable[[], Observer]) -> None:
        """Notify an observer from now on; ``build`` returns a new one, here and after the steps so far were discarded."""
        self._build = build
        self.observer = build()
        self.all.append(self.observer)
        self.observer.start()

    def check(self, contract: ContractWatch) -> None:
        """Notify the watch of a contract from now on."""
        self.contract = contract
        self.all.append(contract)

    def retire(self) -> None:
        """Notify an observer of nothing more if it has seen all its steps and lets the script go on."""
        if self.observer is not None and self.observer.over:
            self.all.remove(self.observer)
            self.retired, self.observer = self.observer, None

    def restart(self) -> None:
        """Discard the steps so far: they did not belong to the training."""
        if self.observer is not None and self._build is not None:
            self.observer.close()
            self.all.remove(self.observer)
            self.observe(self._build)
        for listener in self.all:
            listener.steps_discarded()
