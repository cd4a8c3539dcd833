"""Run a script's code in this process, note how it ended, and make the record of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mezzo.errors import MezzoError, NoKernelError
from mezzo.launch.children_failed import sentence_of
from mezzo.launch.frameworks import Training
from mezzo.launch.process.script_signals import EndedBySignal
from mezzo.launch.request import Request, policy_text
from mezzo.launch.tracebacks import print_error
from mezzo.measure.advice import advice_for
from mezzo.records import AnyRecord, RankRun, Reason, RunRecord

INTERRUPTED = 130

Ending = tuple[int, BaseException | None]
"""An exit code, and the error that ended the script."""


def record_of(
    request: Request,
    training: Training,
    ending: Ending,
    *,
    shell: dict[str, Any],
    ran: tuple[float, float],
    digest: str = "",
    late_settings: Sequence[Reason] = (),
    **measured: Any,
) -> AnyRecord:
    """Return the record of a run that has ended.

    Args:
        request: the run's request.
        training: what the script trained.
        ending: how the script ended.
        shell: fields of the environment as they were before the script began.
        ran: the Unix time at which the run began, and its seconds.
        digest: of the script.
        late_settings: settings that the script made too late to take effect.
        measured: further fields of the record.
    """
    exit_code, error = ending
    effective, stand_in = training.effective(), [] if request.stand_in is None else [request.stand_in.reason]
    left_alone = [*effective.left_alone, *stand_in, *late_settings]
    record = RunRecord(
        command=list(request.command),
        script=request.target,
        script_sha256=digest,
        framework=training.framework,
        policy=policy_text(request.policy),
        policy_typed=request.policy_typed,
        checkpoint="" if request.models is None else request.models.checkpoint,
        explanation=training.explanation(),
        seed=request.seed,
        environment=training.environment().model_copy(update=shell),
        steps=training.steps(),
        memory=training.memory(),
        effective=effective.model_copy(update={"left_alone": left_alone}),
        findings=training.findings(),
        watched=request.watches,
        ranks=[] if request.rank is None else [RankRun(rank=request.rank, weights=training.weights())],
        earlier_update_s=request.earlier_update_s,
        request_sha256=request.digest,
        placement=request.placement,
        started_at_s=ran[0],
        duration_s=ran[1],
        exit_code=exit_code,
        error=_sentence(error),
        hint=hint_of(error),
        **measured,
    )
    if training.observer is None:
        return record
    if error is not None:
        training.observer.failed(error)
    return training.observer.record(record)


def guarded(action: Callable[[], None], *, before: Ending = (0, None)) -> Ending:
    """Run code of the script; return the exit code that Python would give, and the error; an ending ``before`` it takes precedence."""
    ending: Ending = (0, None)
    try:
        action()
    except EndedBySignal as error:
        ending = error.exit_code, error
    except SystemExit as leaving:
        ending = _exit_code(leaving), None
    except MezzoError as error:
        ending = error.exit_code, error
    except KeyboardInterrupt as error:
        print_error(error)
        ending = INTERRUPTED, error
    except BaseException as error:
        print_error(error)
        ending = 1, error
    return ending if before == (0, None) else before


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF  # as the system truncates it
    print(leaving.code, file=sys.stderr)
    return 1


def hint_of(error: BaseException | None) -> str:
    """Return what to do about the error that ended a script; empty if there is no advice."""
    if isinstance(error, MezzoError):
        return error.hint
    return advice_for(sentence_of(error)) if error is not None else ""


def _sentence(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, EndedBySignal):
        return error.sentence
    if isinstance(
        error, NoKernelError
    ):  # stands for an error of torch's, and is told from others by its type as these are
        return f"{type(error).__name__}: {error.message}"
    return error.message if isinstance(error, MezzoError) else sentence_of(error)
