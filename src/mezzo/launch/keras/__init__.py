"""Run Keras code that knows nothing of Mezzo under a policy: every patch of Keras and its backend is applied and undone here.

Keras is patched as soon as the script has imported it, on the backend that the script has chosen.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.errors import ScriptError
from mezzo.frameworks.keras import dtype_policy_name, explain, not_honoured, stage_on
from mezzo.launch.any_script import shift_python, shift_torch
from mezzo.launch.keras.layers import Layers
from mezzo.launch.keras.state import Backend, KerasRun
from mezzo.launch.keras.updates import Updates, num_bytes
from mezzo.launch.patches import Patches, after_import
from mezzo.launch.request import ModelChanges
from mezzo.launch.support import WithoutPyTorch, refusal
from mezzo.launch.training import StepLimit, Watching
from mezzo.measure.environment import environment, environment_without_torch, package_version
from mezzo.measure.live import Report
from mezzo.observe.settings import AnySettings, AuditSettings, DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import Effective, Environment, Memory, Note, OutOfMemory, Steps

if TYPE_CHECKING:
    from mezzo.launch.keras.observed import ObservedKeras


_BACKENDS = ("tensorflow", "torch", "jax")


@contextmanager
def training(policy: Policy | None, *, seed: int | None, observe: AnySettings | None) -> Iterator[KerasTraining]:
    """Run the code inside under ``policy`` (None: its own precision) and record every training step.

    Args:
        policy: the policy to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        observe: settings of the observer, for Keras on PyTorch, or of an audit or a diagnosis on TensorFlow; None to record only.

    Raises:
        PolicyError: Keras has no dtype policy for the policy.
    """
    run, patches = KerasRun(policy), Patches()
    if policy is not None:
        dtype_policy_name(policy)
        for choice in not_honoured(policy):
            run.note_left_alone(choice.what, choice.value, choice.reason)
    try:
        if seed is not None:
            shift_python(seed, patches)
            after_import("torch", lambda: shift_torch(seed, patches), patches)
            after_import("tensorflow", lambda: shift_tensorflow(seed, patches), patches)
        after_import("tensorflow", lambda: refuse_several_workers(patches), patches)
        after_import("keras", lambda: _install(run, seed, observe, patches), patches)
        yield KerasTraining(run)
    finally:
        if run.backend is not None:
            run.backend.finish()
        patches.undo()


def _install(run: KerasRun, seed: int | None, observe: AnySettings | None, patches: Patches) -> None:
    """Patch Keras and its backend, which have just been imported."""
    import keras

    name = keras.backend.backend()
    observer = None if observe is None else _observer(run, observe, name)
    if seed is not None:
        shift_keras(seed, patches)
    backend = _backend_of(name, run)
    is_audit = name == "tensorflow" and isinstance(observe, AuditSettings)
    tape = None
    if run.tape_file is not None:
        from mezzo.launch.keras.step_tape import StepTape

        tape = StepTape(run.tape_file, numbered=name == "tensorflow")
        tape.install(patches)
    run.begin(backend, tape=tape, **{"audit" if is_audit else "observed": observer})
    layers = Layers(run, backend)
    layers.install(patches)
    Updates(run, backend, layers).install(patches)
    backend.install(patches)


def _observer(run: KerasRun, settings: AnySettings, backend: str) -> Any:
    """Return the command's observer of the run."""
    if backend == "tensorflow" and isinstance(settings, AuditSettings):
        from mezzo.launch.keras.graph_audit import GraphAudit

        return GraphAudit(run, settings)
    if backend == "tensorflow" and isinstance(settings, DiagnoseSettings):
        from mezzo.launch.keras.nonfinite_values import ObservedTensorFlow

        return ObservedTensorFlow(run, settings)
    return observed_keras(run, settings, backend)


def observed_keras(run: KerasRun, settings: AnySettings, backend: str) -> ObservedKeras:
    """Return the run in the form that PyTorch's observers need.

    Raises:
        ScriptError: the backend hides its operations.
    """
    refused = refusal(f"mezzo {settings.kind}", stage_on(backend))
    if refused is not None:
        raise refused
    from mezzo.launch.keras.observed import ObservedKeras

    return ObservedKeras(run, settings)


def _backend_of(name: str, run: KerasRun) -> Backend:
    if name == "tensorflow":
        from mezzo.launch.keras.on_tensorflow import TensorFlowBackend

        return TensorFlowBackend(run)
    if name == "torch":
        from mezzo.launch.keras.on_torch import TorchBackend

        return TorchBackend(run)
    if name == "jax":
        from mezzo.launch.keras.on_jax import JaxBackend

        return JaxBackend(run)
    raise ScriptError(
        f"Keras runs on the backend {name!r} here; allowed: {', '.join(_BACKENDS)}",
        hint=f"set KERAS_BACKEND to one of them, as in KERAS_BACKEND={_BACKENDS[0]}",
    )


class KerasTraining(WithoutPyTorch):
    """A Keras script's training (``launch.training.Training``)."""

    stage = "Keras"

    def __init__(self, run: KerasRun) -> None:
        self._run = run

    @property
    def observer(self) -> Watching | None:
        """The observer of the training; None if only its steps are recorded."""
        run = self._run
        observer: Watching | None = run.audit if run.observed is None else run.observed.observer
        return observer

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``."""
        self._run.limit = limit

    def begin_tape(self, path: Path) -> None:
        """Record the operations of one step from now on."""
        self._run.begin_tape(path)

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Change nothing; return a function that returns the input of a step, in elements. A change that is wanted is refused."""
        if changes.channels_last or changes.compiles or changes.checkpoint:
            return super().change_models(changes)
        return self._inputs_per_step

    def _inputs_per_step(self) -> float | None:
        num_inputs = 0 if self._run.backend is None else self._run.backend.num_inputs
        return num_inputs / self.num_updates if num_inputs and self.num_updates else None

    @property
    def framework(self) -> str:
        """The versions of Keras and of its backend."""
        version = package_version("keras") or "not installed"
        return f"keras {version} on {self._run.backend.name if self._run.backend else 'no backend'}"

    @property
    def num_updates(self) -> int:
        """The number of updates."""
        if self._run.backend is not None:
            self._run.backend.collect()
        return self._run.steps.num_closed

    def out_of_memory(self, error: BaseException | None) -> OutOfMemory | None:
        """Return the step and the request of a script on PyTorch that ran out of memory; None for all others."""
        if error is None or self._run.backend is None or self._run.backend.name != "torch":
            return None
        from mezzo.launch.torch.out_of_memory import is_out_of_memory, request_that_failed

        return request_that_failed(error, step=self.num_updates + 1) if is_out_of_memory(error) else None

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Report the latest numbers that the host knows, at most every ``every_s`` seconds."""
        self._run.steps.reports.begin(report, every_s=every_s)

    def close_update(self) -> None:
        """Close the step that is still open for an observer, and read the remaining steps."""
        if self._run.tape is not None:
            self._run.tape.write()
        if self._run.observed is not None:
            self._run.observed.close_update()
        if self._run.backend is not None:
            self._run.backend.finish()
            self._run.backend.collect()

    def steps(self) -> Steps:
        """Return the record of every step."""
        return self._run.steps.steps(self._run.names)

    def memory(self) -> Memory:
        """Return the bytes of variables, gradients and activations, but no peaks of a GPU's memory."""
        run = self._run
        trained = {id(v) for v in run.variables.values()}
        state = {id(v): v for o in run.optimizers.values() for v in o.variables if id(v) not in trained}
        return Memory(
            parameters_bytes=_num_bytes(run.variables.values()) if run.optimizers else None,
            gradients_bytes=run.gradients_bytes,
            optimizer_bytes=_num_bytes(state.values()) if run.optimizers else None,
            activations_bytes=None if run.backend is None else run.backend.counted.activations_bytes,
        )

    def effective(self) -> Effective:
        """Return the formats in which products actually ran."""
        return self._run.effective()

    def explanation(self) -> list[Note]:
        """Return what the policy does in Keras, with reasons."""
        choices = [] if self._run.policy is None else explain(self._run.policy)
        return [Note(what=c.what, value=c.value, reason=c.reason) for c in choices]

    def environment(self) -> Environment:
        """Return the machine and the versions."""
        device = "cpu" if self._run.backend is None else self._run.backend.device_type()
        if device == "cpu" and "torch" not in sys.modules:  # importing torch would cost a script on TensorFlow seconds
            return environment_without_torch().model_copy(update={"device": device})
        return environment(device)


def _num_bytes(variables: Iterable[Any]) -> int:
    return sum(num_bytes(v.shape, v.dtype) for v in variables)


# ``keras.utils.set_random_seed`` sets the seeds of Python, NumPy and the backend by functions each of which is shifted. This
# module adds ``tf.random.set_seed``, and the integers that a script passes as ``seed`` to a layer, an initializer or a
# function of ``keras.random``. If a script passes no seed, Keras draws one from Python's generator, which is shifted.


def shift_tensorflow(seed: int, patches: Patches) -> None:
    """Seed TensorFlow with ``seed``, and add it to every seed set until ``patches`` are undone."""
    import tensorflow as tf

    tf.random.set_seed(seed)
    patches.around(tf.random, "set_seed", functools.partial(_shifted, seed))


def shift_keras(seed: int, patches: Patches) -> None:
    """Add ``seed`` to the integer seeds of Keras' random tensors until ``patches`` are undone."""
    import keras

    generator = importlib.import_module("keras.src.random.seed_generator").SeedGenerator
    patches.around(generator, "__init__", functools.partial(_shifted_generator, seed))
    for module in ("random", "image"):
        users = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.{module}")
        patches.around(users, "draw_seed", functools.partial(_shifted, seed))


def _shifted(by: int, original: Callable[..., Any], seed: Any) -> Any:
    return original(seed + by if isinstance(seed, int) else seed)


def _shifted_generator(
    by: int, original: Callable[..., Any], self: Any, seed: Any = None, *args: Any, **kwargs: Any
) -> None:
    original(self, seed + by if isinstance(seed, int) else seed, *args, **kwargs)


_IN_PROCESSES = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy")


def refuse_several_workers(patches: Patches) -> None:
    """Refuse clusters of more than one process until ``patches`` are undone; call it after TensorFlow's import."""
    import tensorflow as tf

    for name in _IN_PROCESSES:
        patches.around(getattr(tf.distribute, name), "__init__", functools.partial(_alone, name))


def _alone(
    name: str, original: Callable[..., None], self: Any, cluster_resolver: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Make a strategy whose cluster, by default TF_CONFIG's, is one process."""
    import tensorflow as tf

    resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    size = sum(cluster.num_tasks(job) for job in cluster.jobs)
    if size > 1:
        raise ScriptError(
            f"{name} trains in {size} processes, each with a mezzo command of its own; allowed: strategies of one process",
            hint="use tf.distribute.MirroredStrategy, or unset TF_CONFIG to train in one process",
        )
    original(self, cluster_resolver, *args, **kwargs)
