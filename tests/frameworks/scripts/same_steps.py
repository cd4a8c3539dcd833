"""Three steps of a model in torch or Paddle, which name their layers alike: the framework and the model are the arguments."""

import importlib
import itertools
import sys

FRAMEWORK, MODEL = sys.argv[1:]
BATCH, CLASSES = 8, 10
fw = importlib.import_module(FRAMEWORK)
nn, F = fw.nn, importlib.import_module(f"{FRAMEWORK}.nn.functional")
IS_TORCH = FRAMEWORK == "torch"


def layer(torch_name: str, *sizes: int, **settings: object) -> object:
    """Return a layer by torch's name; Paddle writes dimensions in capitals, and a bias as an attribute."""
    name = torch_name if IS_TORCH else torch_name.replace("2d", "2D")
    named = settings if IS_TORCH else {{"bias": "bias_attr"}.get(key, key): value for key, value in settings.items()}
    return getattr(nn, name)(*sizes, **named)


def swapped(x: object, first: int, second: int) -> object:
    if IS_TORCH:
        return x.transpose(first, second)
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return x.transpose(order)


class Model(nn.Module if IS_TORCH else nn.Layer):
    """The layers, which ``forward`` joins."""


class Cnn(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = layer("Conv2d", 3, 32, 3, padding=1, bias=False)
        self.first_norm, self.first_relu, self.pool = layer("BatchNorm2d", 32), layer("ReLU"), layer("MaxPool2d", 2)
        self.second = layer("Conv2d", 32, 64, 3, padding=1, bias=False)
        self.second_norm, self.second_relu = layer("BatchNorm2d", 64), layer("ReLU")
        self.head = layer("Linear", 64, CLASSES)

    def forward(self, x: object) -> object:
        x = self.pool(self.first_relu(self.first_norm(self.first(x))))
        x = self.second_relu(self.second_norm(self.second(x)))
        return self.head(x.mean([2, 3]))


class Mlp(Model):
    def __init__(self) -> None:
        super().__init__()
        sizes = [784, 256, 256]
        parts = [part for n, m in itertools.pairwise(sizes) for part in (layer("Linear", n, m), layer("ReLU"))]
        self.body = nn.Sequential(*parts, layer("Linear", sizes[-1], CLASSES))

    def forward(self, x: object) -> object:
        return self.body(x)


class Embedded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = layer("Embedding", 5000, 64), layer("Linear", 64, CLASSES)

    def forward(self, x: object) -> object:
        return self.head(self.rows(x).mean(1))


class Block(Model):
    def __init__(self, width: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm, self.softmax = layer("LayerNorm", width), layer("Softmax", -1)
        self.q, self.k, self.v, self.out = (layer("Linear", width, width) for _ in range(4))
        self.wide_norm, self.wide, self.gelu = (
            layer("LayerNorm", width),
            layer("Linear", width, 4 * width),
            layer("GELU"),
        )
        self.narrow = layer("Linear", 4 * width, width)

    def forward(self, x: object) -> object:
        batch, length, width = x.shape
        y = self.norm(x)
        parts = [batch, length, self.heads, width // self.heads]
        q, k, v = (swapped(one(y).reshape(parts), 1, 2) for one in (self.q, self.k, self.v))
        weights = self.softmax(q @ swapped(k, -1, -2) * self.scale)
        x = x + self.out(swapped(weights @ v, 1, 2).reshape([batch, length, width]))
        return x + self.narrow(self.gelu(self.wide(self.wide_norm(x))))


class Transformer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.first, self.second = layer("Embedding", 1000, 128), Block(), Block()
        self.head = layer("Linear", 128, CLASSES)

    def forward(self, x: object) -> object:
        return self.head(self.second(self.first(self.rows(x))).mean(1))


MODELS = {
    "cnn": (Cnn, lambda: fw.rand([BATCH, 3, 32, 32])),
    "mlp": (Mlp, lambda: fw.rand([BATCH, 784])),
    "embedded": (Embedded, lambda: fw.randint(0, 5000, [BATCH, 20])),
    "transformer": (Transformer, lambda: fw.randint(0, 1000, [BATCH, 64])),
}
build, batch = MODELS[MODEL]
model = build()
optimizer = fw.optim.SGD(model.parameters(), 0.1) if IS_TORCH else fw.optimizer.SGD(0.1, parameters=model.parameters())
for _ in range(3):
    loss = F.cross_entropy(model(batch()), fw.randint(0, CLASSES, [BATCH]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad() if IS_TORCH else optimizer.clear_grad()
