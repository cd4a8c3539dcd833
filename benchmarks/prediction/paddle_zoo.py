"""Steps of a training in Paddle on random data, as articles time them: ``paddle_zoo.py mobilenet_v3_large --batch-size 8``."""

import argparse

import paddle
from paddle import nn

PIXELS, TOKENS, WIDTH, VOCABULARY, CLASSES = 224, 128, 768, 30522, 1000
STEPS = 3


class Bert(nn.Layer):
    """BERT-base: twelve layers, and a head for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, activation="gelu")
        self.body, self.head = nn.TransformerEncoder(layer, 12), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.body(self.words(tokens) + self.places(paddle.arange(TOKENS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["mobilenet_v3_large", "resnet50", "bert_base"])
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    size, is_text = args.batch_size, args.model == "bert_base"
    model = Bert() if is_text else getattr(paddle.vision.models, args.model)(num_classes=CLASSES)
    weights = model.parameters()
    optimizer = (
        paddle.optimizer.AdamW(1e-4, parameters=weights)
        if is_text
        else paddle.optimizer.Momentum(0.1, parameters=weights)
    )
    for _ in range(STEPS):
        if is_text:
            inputs, labels = (paddle.randint(0, VOCABULARY, [size, TOKENS]) for _ in range(2))
        else:
            inputs, labels = paddle.rand([size, 3, PIXELS, PIXELS]), paddle.randint(0, CLASSES, [size])
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()


main()
