"""Observe small Keras networks on PyTorch in one process: each line of standard input is a case, each line printed its record as JSON."""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

from mezzo.commands.diagnose.plan import diagnose_script
from mezzo.commands.fallback.find import find
from mezzo.errors import MezzoError
from mezzo.launch.keras import training
from mezzo.launch.request import Request, policy_text
from mezzo.observe.fallback.evidence import checked, read_measured
from mezzo.observe.settings import AuditSettings, RangesSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord

B, D, H = 8, 4, 16
STEPS = 6
LAST = {}
"""What the last run leaves for a test to compute by hand."""


def data(factor=1.0):
    random = np.random.RandomState(7)
    return (factor * random.normal(size=(B * STEPS, D))).astype("float32"), random.normal(size=B * STEPS).astype(
        "float32"
    )


class Square(keras.layers.Layer):
    """Squares its input after a factor: FP16 holds no more than 65504."""

    def __init__(self, factor, after=0, **settings):
        super().__init__(**settings)
        self.factor, self.after, self.calls = factor, after, 0

    def call(self, x):
        self.calls += x.device.type != "meta"  # on which Keras infers shapes
        factor = self.factor if self.calls > self.after else 1.0
        return keras.ops.square(x * factor) / factor / factor


class NoInit(keras.layers.Layer):
    """A layer without a constructor of its own."""

    def call(self, x):
        return keras.ops.tanh(x)


def functional(*between, last=None):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((D,))
    x = keras.layers.Dense(H, activation="relu", name="hidden")(inputs)
    for layer in between:
        x = layer(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="head", dtype=last)(x), name="net")


def fitted(model, optimizer=None, factor=1.0, epochs=1, **settings):
    x, y = data(factor)
    model.compile(optimizer or keras.optimizers.SGD(0.01), loss="mse", **settings)
    model.fit(x, y, B, epochs, shuffle=False, verbose=0)


def plain():
    fitted(functional())


def own_head():
    fitted(functional(last="float32"))


def healthy():
    keras.utils.set_random_seed(3)
    norm, drop = keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.2, name="drop")
    fitted(functional(norm, drop, NoInit(name="own")), keras.optimizers.Adam(0.01))


def squared():
    fitted(functional(Square(300.0, name="power")))


def squared_later():
    fitted(functional(Square(300.0, after=2, name="power")))


def nested():
    keras.utils.set_random_seed(3)
    inner = keras.Sequential([keras.layers.Dense(H, name="body"), Square(300.0, name="power")], name="block")
    fitted(functional(inner))


def own_mixed():
    """The script's own mixed precision."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        fitted(functional(Square(300.0, name="power")))
    finally:
        keras.config.set_dtype_policy(before)


def steep():
    """Gradients that need no loss scale: too large for one of 2**20."""
    fitted(functional())


def own_loop():
    """A loop by hand, which calls no scale_loss and clips true gradients."""
    x, y = (keras.ops.convert_to_tensor(values) for values in data())
    model, optimizer = functional(), keras.optimizers.SGD(0.01)
    for k in range(STEPS):
        model.zero_grad()
        keras.ops.mean(keras.ops.square(model(x[k * B :][:B], training=True)[:, 0] - y[k * B :][:B])).backward()
        with torch.no_grad():
            found = [v.value.grad.clamp(-1, 1) for v in model.trainable_variables]
            optimizer.apply(found, model.trainable_variables)


def large_gradients():
    fitted(functional(), factor=10.0, epochs=4)


def not_a_number():
    x, y = data()
    x[3 * B, 0] = np.nan
    model = functional()
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    model.fit(x, y, B, 1, shuffle=False, verbose=0)


def recurrent():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Embedding(7, 4, mask_zero=True, name="words")]
    model = keras.Sequential([*layers, keras.layers.LSTM(6, name="memory"), keras.layers.Dense(1, name="head")])
    _, y = data()
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    model.fit(np.arange(B * STEPS * 5).reshape(-1, 5) % 7, y, B, 1, shuffle=False, verbose=0)


class Gan(keras.Model):
    """Two models in one training step, each with an optimizer."""

    def __init__(self):
        super().__init__(name="gan")
        self.maker = keras.Sequential([keras.Input((D,)), keras.layers.Dense(D, name="draw")], name="maker")
        self.judge = keras.Sequential([keras.Input((D,)), keras.layers.Dense(1, name="score")], name="judge")
        self.first, self.second = keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)

    def call(self, x):
        return self.judge(self.maker(x))

    def _turn(self, model, optimizer, loss):
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

    def train_step(self, data):
        x = data[0]
        self.zero_grad()
        self._turn(self.judge, self.first, keras.ops.mean(self.judge(x)) - keras.ops.mean(self.judge(self.maker(x))))
        self.zero_grad()
        self._turn(self.maker, self.second, -keras.ops.mean(self.judge(self.maker(x))))
        return {}


def gan():
    keras.utils.set_random_seed(3)
    model = Gan()
    x, y = data()
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    model.fit(x, y, B, 1, shuffle=False, verbose=0)


def counted():
    """One step whose values a test can compute by hand."""
    model = functional()
    x, y = (values[:B] for values in data())
    LAST["weights"] = [w.tolist() for w in model.get_weights()]
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    model.fit(x, y, B, 1, shuffle=False, verbose=0)


def compiled_step():
    fitted(functional(), jit_compile=True)


def ran(case, policy, settings):
    """Run a case under a policy and an observer, as a child process would."""
    keras.backend.clear_session()
    error, exit_code = None, 0
    with training(policy, seed=None, observe=settings) as trained:
        for action in (globals()[case], trained.close_update):
            try:
                action()
            except SystemExit:
                pass
            except MezzoError as raised:
                error, exit_code = raised.message, raised.exit_code
            except Exception as raised:
                error, exit_code = f"{type(raised).__name__}: {raised}", 1
    run = RunRecord(
        command=[case],
        script=case,
        script_sha256="",
        framework=trained.framework,
        policy=policy_text(policy),
        environment=trained.environment(),
        steps=trained.steps(),
        effective=trained.effective(),
        exit_code=exit_code,
        error=error,
    )
    return trained.observer, trained.observer.record(run)


def observed(kind, case, policy, steps, folder):
    chosen = None if policy == "as-is" else Policy.parse(policy)
    if kind == "audit":
        return ran(case, chosen, AuditSettings(steps=(steps,)))[1]
    if kind == "ranges":
        settings = RangesSettings(steps=tuple(range(1, steps + 1)), policy=chosen)
        return ran(case, Policy.parse("fp32"), settings)[1]
    if kind == "diagnose":
        request = Request(
            target=case, kind="script", policy=chosen, record_path=str(folder / "record.json"), command=(case,)
        )
        return diagnose_script(request, steps=steps, child=lambda r, output: ran(case, r.policy, r.observe)[1])

    def measure(policy, settings, ahead):
        run = ran(case, policy, settings)[1]
        return checked(read_measured(settings), run, where="", role=settings.role), run

    return find(measure, chosen, folder=str(folder))


if __name__ == "__main__":
    for line in sys.stdin:
        kind, case, policy, steps = json.loads(line)
        folder = Path(tempfile.mkdtemp())
        try:
            record = observed(kind, case, policy, steps, folder).model_dump(mode="json")
        except MezzoError as error:
            record = {"error": f"{type(error).__name__}: {error.message}"}
        shutil.rmtree(folder)
        print(json.dumps({**record, "last": LAST}), flush=True)
