"""Two steps of ``fit`` of the models of same_steps.py in Keras; the argument names one, or ``eager``, ``loop`` and ``recurrent``."""

import sys

import keras
import numpy as np
from keras import layers, ops

MODEL = sys.argv[1]
BATCH, CLASSES = 8, 10


class Block(layers.Layer):
    """A block of a transformer."""

    def __init__(self, width: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm, self.softmax = layers.LayerNormalization(), layers.Softmax()
        self.q, self.k, self.v, self.out = (layers.Dense(width) for _ in range(4))
        self.wide_norm, self.wide = layers.LayerNormalization(), layers.Dense(4 * width)
        self.gelu, self.narrow = layers.Activation("gelu"), layers.Dense(width)

    def call(self, x: object) -> object:
        length, y = x.shape[1], self.norm(x)
        parts = (-1, length, self.heads, self.size)
        q, k, v = (ops.transpose(ops.reshape(one(y), parts), (0, 2, 1, 3)) for one in (self.q, self.k, self.v))
        weights = self.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * self.size**-0.5)
        joined = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))
        x = x + self.out(ops.reshape(joined, (-1, length, self.heads * self.size)))
        return x + self.narrow(self.gelu(self.wide(self.wide_norm(x))))


def cnn() -> list[object]:
    convolution = {"kernel_size": 3, "padding": "same", "use_bias": False}
    first = [layers.Conv2D(32, **convolution), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(2)]
    second = [layers.Conv2D(64, **convolution), layers.BatchNormalization(), layers.ReLU()]
    return [layers.Input((32, 32, 3)), *first, *second, layers.GlobalAveragePooling2D()]


def mlp() -> list[object]:
    return [layers.Input((784,)), layers.Dense(256), layers.ReLU(), layers.Dense(256), layers.ReLU()]


def embedded() -> list[object]:
    return [layers.Input((20,), dtype="int32"), layers.Embedding(5000, 64), layers.GlobalAveragePooling1D()]


def transformer() -> list[object]:
    rows = layers.Embedding(1000, 128)
    return [layers.Input((64,), dtype="int32"), rows, Block(), Block(), layers.GlobalAveragePooling1D()]


def recurrent() -> list[object]:
    return [layers.Input((7, 5)), layers.SimpleRNN(6)]


def own_loop(x: object, y: object) -> None:
    """Train for two steps in a loop of the script's own, on JAX."""
    import jax

    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def loss_of(weights: object, others: object) -> object:
        return loss(y, model.stateless_call(weights, others, x)[0])

    owned = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    weights, others, state = ([variable.value for variable in variables] for variables in owned)
    for _ in range(2):
        gradients = jax.grad(loss_of)(weights, others)
        weights, state = optimizer.stateless_apply(state, gradients, weights)


MODELS = {
    "eager": mlp,
    "loop": mlp,
    "cnn": cnn,
    "mlp": mlp,
    "embedded": embedded,
    "transformer": transformer,
    "recurrent": recurrent,
}
model = keras.Sequential([*MODELS[MODEL](), layers.Dense(CLASSES)])
sizes = [2 * BATCH, *model.input_shape[1:]]
most = {"embedded": 5000, "transformer": 1000}.get(MODEL)
draw = np.random.default_rng(0)
x = draw.integers(0, most, sizes) if most else draw.random(sizes, dtype=np.float32)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
y = draw.integers(0, CLASSES, 2 * BATCH)
if MODEL == "loop":
    own_loop(x, y)
else:
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=MODEL == "eager")
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
