"""Train a Keras network with a loss scale, by Keras alone or under Mezzo; one JSON line a run: the weights and momenta after each update.

Read from standard input: lines ``[CASE, POLICY, SCALE]``. Without a policy, the script switches Keras' own mixed precision on: FP16 and a
``LossScaleOptimizer`` from that scale, or BF16 without a scale. All runs share one process: importing a backend takes seconds.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204, E402
import json
import sys

import keras
import numpy as np

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
elif BACKEND == "jax":
    import jax
else:
    import torch

from mezzo.errors import MezzoError
from mezzo.launch.keras import training
from mezzo.policy import Policy

B, D, C, UPDATES = 8, 4, 3, 10
LIMIT = 0.2  # of the script's own clipping
OPTIMIZERS = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.1},
    "global": {"global_clipnorm": 0.1},
}


def data(case):
    random = np.random.RandomState(7)
    x, y = random.normal(size=(B * UPDATES, D)).astype("float32"), random.randint(0, C, B * UPDATES)
    if case == "replicas_second_overflows":
        x[3 * B - 1] = 6e4  # the last sample of the third batch: the second replica's
    return x, y


def loss_function(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def array(variable):
    value = variable.value if BACKEND == "jax" else keras.ops.convert_to_tensor(variable)
    return np.ravel(keras.ops.convert_to_numpy(value)).astype("float64").tolist()


class Log(keras.callbacks.Callback):
    """Keep the weights, and the momenta, after each update."""

    def __init__(self, network, optimizer):
        super().__init__()
        self.network, self.optimizer, self.rows, self.scales = network, optimizer, [], []

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND == "jax" and hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.keep()

    def keep(self):
        kept = [*self.network.trainable_variables, *(v for v in self.optimizer.variables if "momentum" in v.path)]
        self.rows.append([number for variable in kept for number in array(variable)])


class OwnStep(keras.Model):
    """A training step as Keras' guides write it; it scales its loss, or not, and clips its gradients, or not."""

    def __init__(self, inner, *, scales, clips):
        super().__init__()
        self.inner, self.scales, self.clips, self.loss_of = inner, scales, clips, loss_function()
        self.built = True

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def scaled(self, loss):
        return self.optimizer.scale_loss(loss) if self.scales else loss

    def clipped(self, gradients, scale):
        return clipped(gradients, scale if self.scales else 1.0) if self.clips else gradients

    def train_step(self, *args):
        return {"tensorflow": self.with_tape, "jax": self.stateless, "torch": self.with_torch}[BACKEND](*args)

    def with_tape(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.scaled(self.loss_of(y, self(x, training=True)))
        found = tape.gradient(loss, self.trainable_variables)
        found = self.clipped(found, self.optimizer.dynamic_scale if self.scales else 1.0)
        self.optimizer.apply(found, self.trainable_variables)
        return {"loss": loss}

    def with_torch(self, data):
        x, y = data
        self.zero_grad()
        loss = self.scaled(self.loss_of(y, self(x, training=True)))
        loss.backward()
        found = [v.value.grad for v in self.trainable_variables]
        with torch.no_grad():
            found = self.clipped(found, self.optimizer.dynamic_scale.value if self.scales else 1.0)
            self.optimizer.apply(found, self.trainable_variables)
        return {"loss": loss.detach()}

    def stateless(self, state, data):
        trained, others, held, metrics = state
        x, y = data
        mapping = list(zip(self.optimizer.variables, held, strict=True))

        def loss_of(trained, others):
            found, others = self.stateless_call(trained, others, x, training=True)
            with keras.StatelessScope(state_mapping=mapping):
                return self.scaled(self.loss_of(y, found)), others

        (loss, others), found = jax.value_and_grad(loss_of, has_aux=True)(trained, others)
        if self.scales:
            scale = next(value for variable, value in mapping if variable is self.optimizer.dynamic_scale)
        found = self.clipped(found, scale if self.scales else 1.0)
        trained, held = self.optimizer.stateless_apply(held, found, trained)
        return {"loss": loss}, (trained, others, held, metrics)


def clipped(gradients, scale):
    """Clip gradients as a script does: by the norm that they have without the scale."""
    norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(g / scale)) for g in gradients))
    return [g * keras.ops.minimum(1.0, LIMIT / norm) for g in gradients]


def loop(network, optimizer, log, x, y, *, scales, case):
    """Train in a loop of the script's own, whose loss may be a share of the scaled one, and whose gradients may be asked for directly."""
    loss_of = loss_function()
    variables = network.trainable_variables

    def scaled(loss):
        loss = optimizer.scale_loss(loss) if scales else loss
        return loss / 2 if "share" in case else loss

    def step(a, b):
        if BACKEND == "tensorflow":
            with tf.GradientTape() as tape:
                loss = scaled(loss_of(b, network(a, training=True)))
            optimizer.apply(tape.gradient(loss, variables), variables)
            return
        network.zero_grad()
        batch = torch.tensor(a, requires_grad=case == "loop_adversarial")
        loss = scaled(loss_of(torch.tensor(b), network(batch, training=True)))
        if case == "loop_adversarial":  # its own unscaled gradient moves the batch
            loss.backward()
            by = 2.0**-16 if scales else 1.0
            moved = (batch + 0.1 * by * batch.grad).detach()
            network.zero_grad()
            loss = scaled(loss_of(torch.tensor(b), network(moved, training=True)))
        if case == "loop_grad":
            found = torch.autograd.grad(loss, [v.value for v in variables])
        else:
            loss.backward()
            found = [v.value.grad for v in variables]
        with torch.no_grad():
            optimizer.apply(found, variables)

    step = jax_step(network, optimizer, loss_of, scaled) if BACKEND == "jax" else step
    step = tf.function(step) if BACKEND == "tensorflow" and case != "loop_eager" else step
    for k in range(UPDATES):
        step(x[k * B :][:B], y[k * B :][:B])
        log.keep()


def jax_step(network, optimizer, loss_of, scaled):
    lists = network.trainable_variables, network.non_trainable_variables, optimizer.variables

    @jax.jit
    def traced(trained, others, held, a, b):
        def loss(trained):
            found, _ = network.stateless_call(trained, others, a, training=True)
            with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, held, strict=True))):
                return scaled(loss_of(b, found))

        trained, held = optimizer.stateless_apply(held, jax.grad(loss)(trained), trained)
        return trained, others, held

    def step(a, b):
        found = traced(*([v.value for v in each] for each in lists), a, b)
        for each, values in zip(lists, found, strict=True):
            for variable, value in zip(each, values, strict=True):
                variable.assign(value)

    return step


def replicas(network, optimizer, log, x, y, *, scales, strategy):
    """Train two replicas, each on half of a batch, and keep the norm of the gradients' sum."""
    loss_of = loss_function(reduction=None)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(B))

    def step(a, b):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(loss_of(b, network(a, training=True)), global_batch_size=B)
            loss = optimizer.scale_loss(loss) if scales else loss
        found = tape.gradient(loss, network.trainable_variables)
        true = [g / optimizer.dynamic_scale for g in found] if scales else found
        norm = tf.linalg.global_norm(tf.distribute.get_replica_context().all_reduce("SUM", true))
        optimizer.apply(found, network.trainable_variables)
        return norm

    @tf.function
    def run(a, b):
        return strategy.reduce("MEAN", strategy.run(step, args=(a, b)), axis=None)

    for a, b in dataset:
        log.scales.append(float(run(a, b)))
        log.keep()


def embedding():
    """Train an embedding whose rows are used several times, and keep the norms of the gradients in which they are summed."""
    keras.utils.set_random_seed(3)
    network = keras.Sequential(
        [keras.Input((5,)), keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(C)]
    )
    optimizer, norms, (_, y) = keras.optimizers.SGD(0.1), [], data("embedding")
    tokens = np.arange(B * UPDATES * 5).reshape(-1, 5) % 7

    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = loss_function()(b, network(a, training=True))
        found = tape.gradient(loss, network.trainable_variables)
        optimizer.apply(found, network.trainable_variables)
        return tf.linalg.global_norm([tf.convert_to_tensor(g) for g in found])

    for k in range(UPDATES):
        norms.append(float(step(tokens[k * B :][:B], y[k * B :][:B])))
    return {"rows": [], "norms": norms}


def two_strategies(scale):
    """Fit a model under a strategy, then another one under a new strategy, as scripts do that restore a checkpoint."""
    keras.utils.set_random_seed(3)
    x, y = data("two_strategies")
    rows = []
    for part in np.split(np.arange(len(x)), 2):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            network = keras.Sequential([keras.Input((D,)), keras.layers.Dense(C)])
            optimizer = inner = keras.optimizers.SGD(0.1, momentum=0.9)
            if scale is not None:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
            network.compile(optimizer, loss_function())
            network.optimizer.build(network.trainable_variables)
            log = Log(network, inner)
        network.fit(x[part], y[part], B, 1, shuffle=False, verbose=0, callbacks=[log])
        rows += log.rows
    return {"rows": rows, "norms": []}


def made(case, scale):
    """Train; ``scale`` is the first one of the script's own LossScaleOptimizer, or None without one."""
    if case == "embedding":
        return embedding()
    if case == "two_strategies":
        return two_strategies(scale)
    if case in ("MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        cluster = tf.train.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
        getattr(tf.distribute, case)(tf.distribute.cluster_resolver.SimpleClusterResolver(cluster))
    keras.utils.set_random_seed(3)
    scales = scale is not None
    x, y = data(case)
    strategy = None
    if case.startswith("replicas"):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    elif case == "one_device":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope() if strategy else tf.name_scope("") if BACKEND == "tensorflow" else keras.name_scope("own"):
        network = keras.Sequential([keras.Input((D,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(C)])
        optimizer = inner = keras.optimizers.SGD(0.1, momentum=0.9, **OPTIMIZERS.get(case, {}))
        if scales or (BACKEND == "jax" and case.startswith("loop") and case.endswith("_scaled")):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **({"initial_scale": scale} if scales else {}))
        log = Log(network, inner)
        own_scale = scales or case.endswith("_scaled")
        if case.startswith("loop") or strategy:
            optimizer.build(network.trainable_variables)
        else:
            model = network
            if case.startswith("step"):
                model = OwnStep(network, scales=own_scale, clips="clips" in case)
            model.compile(optimizer, loss_function(), jit_compile=BACKEND == "jax")
            model.optimizer.build(model.trainable_variables)
    if strategy:
        replicas(network, optimizer, log, x, y, scales=scales, strategy=strategy)
    elif case.startswith("loop"):
        loop(network, optimizer, log, x, y, scales=own_scale, case=case)
    else:
        model.fit(x, y, B, 1, shuffle=False, verbose=0, callbacks=[log])
    return {"rows": log.rows, "norms": log.scales}


def run(case, policy, scale):
    keras.backend.clear_session()
    if policy is None:
        keras.config.set_dtype_policy("mixed_bfloat16" if scale is None else "mixed_float16")
        try:
            return made(case, scale)
        finally:
            keras.config.set_dtype_policy("float32")
    try:
        with training(Policy.parse(policy), seed=None, observe=None) as trained:
            found = made(case, None)
            trained.close_update()
    except MezzoError as error:
        return {"error": error.message}
    return found | {"steps": trained.steps().model_dump(mode="json")}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
