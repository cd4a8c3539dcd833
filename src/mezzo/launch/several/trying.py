"""Try what may help against a fault, by running the script with it up to the step of the fault. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from mezzo.observe.fallback.search import outermost
from mezzo.observe.nonfinite import fixes, words
from mezzo.observe.nonfinite.fixes import Offer
from mezzo.observe.settings import DiagnoseSettings
from mezzo.records import AnyRecord, DiagnoseRecord

_MOST = 5
"""Runs at most to find a fix."""
_MOST_MODULES = 3
_SETTLING = 16
"""Steps that a dynamic loss scale may take to find its value."""

Run = Callable[..., AnyRecord]


def inspected(last: int) -> tuple[int, ...]:
    """Return the steps to inspect in a run of ``last`` steps: 1, 2, 4, 8 and so on, and the last one."""
    return tuple(sorted({*(2**k for k in range(last.bit_length())), last}))


class Trials:
    """Runs of a script with one fix after the other."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """Get ready.

        Args:
            run: runs the script with settings, a reason and a policy.
            say: is told how a run came out.
        """
        self._run, self._say = run, say
        self._tried: list[str] = []

    def fixed(self, found: DiagnoseRecord, *, last: int) -> DiagnoseRecord:
        """Return ``found`` with the first fix that makes the script healthy up to step ``last``.

        A module in FP32 may hand on what the next one does not hold: then both are tried together.
        """
        waiting, steps = fixes.offers_for(found), max(last, found.step + _SETTLING)
        while waiting and len(self._tried) < _MOST:
            offer = waiting.pop(0)
            if not offer.can_run:
                continue
            again = self._ran(offer, steps)
            if isinstance(again, DiagnoseRecord) and _helped(again, last):
                return _with(found, offer, again)
            more = _more(offer, found, again)
            if more is not None:
                waiting.insert(0, more)
        return self._without_success(found)

    def _ran(self, offer: Offer, steps: int) -> AnyRecord:
        settings = DiagnoseSettings(
            steps=inspected(steps), loss_scale=offer.loss_scale, fp32_modules=offer.fp32_modules
        )
        self._tried.append(offer.advice)
        record = self._run(settings, f"to try: {offer.advice}", policy=offer.policy)
        self._say(_outcome(record))
        return record

    def _without_success(self, found: DiagnoseRecord) -> DiagnoseRecord:
        offers = fixes.offers_for(found)
        untried = next((offer for offer in offers if not offer.can_run), None)
        if untried is not None:
            return fixes.offered(found.model_copy(update={"fix": "", "fix_line": ""}))
        if not offers:
            return found
        advice = f"none of these helps by itself: {'; '.join(self._tried)}"
        causes = [note.value for note in found.notes if note.what == "cause"]
        next_step = "mezzo fallback searches for what has to stay in FP32 together"
        if found.format in causes:  # a format that the script chose itself
            next_step = f"change the cast to {found.format} in the script"
        elif words.ITSELF in causes:
            next_step = f"the training fails in FP32 too: {words.DIVERGES}"
        return found.model_copy(update={"fix": advice, "fix_line": "", "fix_tried": False, "fix_note": next_step})


def _with(found: DiagnoseRecord, offer: Offer, again: DiagnoseRecord) -> DiagnoseRecord:
    count = len(again.run.steps)
    rest = "nothing is wrong" if again.verdict == "healthy" else f"the next fault is in step {again.step}"
    how = "with it" if offer.policy is None or str(offer.policy) == found.run.policy else f"under {offer.policy}"
    note = f"tried: the script ran {count} step{'s' if count != 1 else ''} {how}, and {rest}"
    note = "; ".join(filter(None, [note, fixes.in_the_script(found)]))
    update = {"fix": offer.advice, "fix_line": offer.line, "fix_tried": True, "fix_note": note}
    return found.model_copy(update=update)


def _helped(again: DiagnoseRecord, last: int) -> bool:
    """Return whether a run came beyond step ``last`` without a fault, its loss scale found."""
    if not any(not skipped for skipped in again.run.steps.skipped):
        return False
    if again.verdict == "healthy":
        return len(again.run.steps) >= last
    return again.verdict != "unfinished" and again.step > last and not any(s <= last for s in again.faulty_steps)


def _more(offer: Offer, found: DiagnoseRecord, again: AnyRecord) -> Offer | None:
    """Return the offer to keep the module as well where the fault is now."""
    kept = () if found.pattern == "" else (found.pattern, *offer.fp32_modules)
    if not isinstance(again, DiagnoseRecord) or not again.pattern or not kept or len(kept) >= _MOST_MODULES:
        return None
    names = outermost((*kept, again.pattern))
    keeps_modules = bool(offer.fp32_modules or (offer.policy and offer.policy.fp32_modules))
    same = again.pattern in kept or again.verdict not in ("range_overflow", "silent_saturation")
    return None if same or not keeps_modules else fixes.wider(found, names)


def _outcome(record: AnyRecord) -> str:
    if not isinstance(record, DiagnoseRecord):
        return "the process died"
    if record.verdict == "healthy":
        return "nothing is wrong"
    if record.located:
        return f"{record.verdict.replace('_', ' ')} in step {record.step}: {record.op} of {record.module}"
    return record.run.error or f"step {record.step} is not finite"
