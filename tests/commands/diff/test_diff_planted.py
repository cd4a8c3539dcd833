"""A difference planted in a script is found where it is: operation, module, phase and step, and what only one run computes there."""

from __future__ import annotations

import pytest

from helpers_diff import Edit, edited, judged, place, unedited
from mezzo.commands.diff.judge import judge

MIX = "attention = model.blocks[5].attention\nattention.mix = lambda q, k, v: "
SDPA = "F.scaled_dot_product_attention"
UP = "up = model.blocks[2].mlp[0]\nup.forward = lambda x: "
DOWN = "down = model.blocks[2].mlp[2]\ndown.forward = lambda x: "
HALVES = "(x[..., :32] @ down.weight[:, :32].T).bfloat16() + (x[..., 32:] @ down.weight[:, 32:].T).bfloat16()"
MLP, RESULT = "model.blocks[3].mlp[1]", "return x + self.mlp(self.norm2(x))"
FUNCTION = """
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.sigmoid(1.702 * ctx.saved_tensors[0])

model.blocks[4].mlp[1].forward = Wrong.apply
""".strip()
PARAMETERS = "AdamW(model.parameters(), lr=1e-3)"
GROUPS = 'AdamW([{"params": [p for p in model.parameters() if not (%s)]}, {"params": [p for p in model.parameters() if %s], %s}], lr=1e-3)'
OF_BIASES = GROUPS % ("p.ndim == 1", "p.ndim == 1", '"weight_decay": 0.1')
OF_HEAD = GROUPS % ("p is model.head.weight", "p is model.head.weight", '"lr": 2e-3')
CONV = "conv = model.blocks[4].conv1\nconv.forward = lambda x: "
SCALE = "self.stem(x)"

# what is planted, the text that it replaces, the text, the first beginning in the edited run,
# and an operation that only the first run (-) or only the edited one (+) has
FORWARD = {
    "decoder": [
        ("eps of one norm", "# model", "model.blocks[6].norm1.eps = 1e-4", "layer_norm blocks.6.norm1 forward 1", ""),
        ("gelu by tanh", "# model", f'{MLP}.approximate = "tanh"', "gelu blocks.3.mlp.1 forward 1", ""),
        ("relu for gelu", "# model", f"{MLP}.forward = F.relu", "relu blocks.3.mlp.1 forward 1", ""),
        (
            "no mask",
            "# model",
            f"{MIX}{SDPA}(q, k, v)",
            "scaled_dot_product_attention blocks.5.attention forward 1",
            "",
        ),
        (
            "mask one place off",
            "# model",
            f"{MIX}{SDPA}(q, k, v, attn_mask=torch.ones(12, 12).tril(1).bool())",
            "scaled_dot_product_attention blocks.5.attention forward 1",
            "+tril blocks.5.attention",
        ),
        (
            "scale of attention",
            "# model",
            f"{MIX}{SDPA}(q, k, v, is_causal=True, scale=0.36)",
            "scaled_dot_product_attention blocks.5.attention forward 1",
            "",
        ),
        (
            "queries for keys",
            "# model",
            f"{MIX}{SDPA}(k, q, v, is_causal=True)",
            "scaled_dot_product_attention blocks.5.attention forward 1",
            "",
        ),
        (
            "keys for values",
            "# model",
            f"{MIX}{SDPA}(q, k, k, is_causal=True)",
            "scaled_dot_product_attention blocks.5.attention forward 1",
            "",
        ),
        (
            "attention by parts without its mask",
            "# model",
            f"{MIX}(q @ k.mT / 8**0.5).softmax(-1) @ v",
            "bmm blocks.5.attention forward 1",
            "+softmax blocks.5.attention",
        ),
        (
            "one module in bf16",
            "# model",
            f"{UP}F.linear(x.bfloat16(), up.weight.bfloat16(), up.bias.bfloat16()).float()",
            "addmm blocks.2.mlp.0 forward 1",
            "+to blocks.2.mlp.0",
        ),
        (
            "two halves added in bf16",
            "# model",
            f"{DOWN}({HALVES}).float() + down.bias",
            "add blocks.2.mlp.2 forward 1",
            "+mm blocks.2.mlp.2",
        ),
        (
            "weights of a product in bf16",
            "return self.head(x)",
            "return F.linear(x, self.head.weight.bfloat16().float())",
            "mm Decoder forward 1",
            "+to Decoder",
        ),
        (
            "loss in fp16",
            "logits[:, :-1].flatten(0, 1)",
            "logits[:, :-1].flatten(0, 1).half()",
            "log_softmax (script) forward 1",
            "+to (script)",
        ),
        (
            "no residual",
            RESULT,
            "return self.mlp(self.norm2(x)) + (0 if self is model.blocks[7] else x)",
            "add blocks.7 forward 1",
            "",
        ),
        (
            "a scaled residual",
            RESULT,
            "return x + self.mlp(self.norm2(x)) * (1.01 if self is model.blocks[7] else 1)",
            "add blocks.7 forward 1",
            "+mul blocks.7",
        ),
        (
            "no norm",
            "x + self.attention(self.norm1(x))",
            "x + self.attention(x if self is model.blocks[1] else self.norm1(x))",
            "addmm blocks.1.attention.qkv forward 1",
            "-layer_norm blocks.1.norm1",
        ),
        (
            "keys and values in another order",
            "return self.qkv(x).chunk(3, -1)",
            "q, k, v = self.qkv(x).chunk(3, -1)\nreturn (q, v, k) if self is model.blocks[8].attention else (q, k, v)",
            "scaled_dot_product_attention blocks.8.attention forward 1",
            "",
        ),
        ("places one off", "arange(ids.shape[1])", "arange(1, 13)", "arange Decoder forward 1", ""),
        (
            "no places",
            "self.words(ids) + self.places(torch.arange(ids.shape[1]))",
            "self.words(ids)",
            "layer_norm blocks.0.norm1 forward 1",
            "-embedding places",
        ),
        ("labels not shifted", "ids[:, 1:].flatten()", "ids[:, :-1].flatten()", "clone (script) forward 1", ""),
        (
            "smoothed labels",
            "ids[:, 1:].flatten())",
            "ids[:, 1:].flatten(), label_smoothing=0.01)",
            "loss (script) forward 1",
            "+sum (script)",
        ),
        ("one word ignored", "1:].flatten())", "1:].flatten(), ignore_index=3)", "nll_loss (script) forward 1", ""),
        ("sum for mean", "1:].flatten())", '1:].flatten(), reduction="sum")', "nll_loss (script) forward 1", ""),
        ("no last norm", "self.score(self.norm(x))", "self.score(x)", "mm head forward 1", "-layer_norm norm"),
        ("scaled words", "self.words(ids) +", "4 * self.words(ids) +", "add Decoder forward 1", "+mul Decoder"),
        ("temperature", "self.head(x)", "self.head(x) / 1.01", "clone (script) forward 1", "+div Decoder"),
        ("dropout", "# model", "model.blocks[4].mlp[3].p = 0.1", "add blocks.4 forward 1", "+bernoulli blocks.4.mlp.3"),
        ("other data", "manual_seed(1)", "manual_seed(2)", "data (script) forward 1", ""),
        (
            "other weights",
            "# model",
            "nn.init.normal_(model.blocks[4].mlp[0].weight)",
            "weight blocks.4.mlp.0.weight forward 1",
            "",
        ),
    ],
    "images": [
        ("eps", "# model", "model.blocks[9].norm2.eps = 1e-3", "batch_norm blocks.9.norm2 forward 1", ""),
        ("momentum", "# model", "model.blocks[9].norm2.momentum = 0.2", "batch_norm blocks.9.norm2 forward 1", ""),
        ("evaluation", "# data", "model.blocks[9].norm2.eval()", "batch_norm blocks.9.norm2 forward 1", ""),
        (
            "circular padding",
            "# model",
            f'{CONV}F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), conv.weight)',
            "conv2d blocks.4.conv1 forward 1",
            "+copy_ blocks.4.conv1",
        ),
        ("mean for maximum", "# model", "model.pool = nn.AvgPool2d(2)", "avg_pool2d pool forward 1", ""),
        (
            "fp16",
            "# model",
            f"{CONV}F.conv2d(x.half(), conv.weight.half(), padding=1).float()",
            "conv2d blocks.4.conv1 forward 1",
            "+to blocks.4.conv1",
        ),
        ("leaky", "# model", "model.blocks[6].act = nn.LeakyReLU()", "leaky_relu blocks.6.act forward 1", ""),
        ("mirrored images", "# data", "x = x.flip(-1)", "data (script) forward 1", ""),
        ("scaled images", SCALE, "self.stem(x / 2)", "conv2d stem forward 1", "+div Images"),
    ],
    "sequences": [
        ("state lost", "# state", "state = None", "lstm lstm forward 1", "+zeros lstm"),
        (
            "state in bf16",
            "# state",
            "state = tuple(s.bfloat16().float() for s in state)",
            "lstm lstm forward 1",
            "+to Sequences",
        ),
    ],
    "masks": [
        (
            "no skip",
            "self.larger(middle), two",
            "self.larger(middle), torch.zeros_like(two)",
            "cat Masks forward 1",
            "+zeros_like Masks",
        ),
        ("corners aligned", "align_corners=False", "align_corners=True", "interpolate Masks forward 1", ""),
        ("nearest", 'mode="bilinear", align_corners=False', 'mode="nearest"', "interpolate Masks forward 1", ""),
        ("groups", "# model", "model.middle[1].num_groups = 4", "group_norm middle.1 forward 1", ""),
        (
            "weighted loss",
            "with_logits(model(x), y)",
            "with_logits(model(x), y, pos_weight=torch.tensor(1.1))",
            "binary_cross_entropy_with_logits (script) forward 1",
            "+constant (script)",
        ),
        (
            "sigmoid twice",
            "with_logits(model(x), y)",
            "with_logits(model(x).sigmoid(), y)",
            "binary_cross_entropy_with_logits (script) forward 1",
            "+sigmoid (script)",
        ),
    ],
}
BACKWARD = {
    "decoder": [
        ("wrong function", "# model", FUNCTION, "wrong blocks.4.mlp.1 backward 1", "+wrong blocks.4.mlp.1"),
        (
            "hook on a weight",
            "# model",
            "model.blocks[7].mlp[0].weight.register_hook(lambda g: 1.01 * g)",
            "gradient blocks.7.mlp.0.weight backward 1",
            "+accumulate_grad (script)",
        ),
        (
            "hook on a module",
            "# model",
            "model.blocks[7].mlp.register_full_backward_hook(lambda m, inside, outside: (1.01 * inside[0],))",
            "layer_norm blocks.7.norm2 backward 1",
            "+backward_hook_function blocks.7.mlp",
        ),
        (
            "gradient in bf16",
            "# model",
            f"{MLP}.register_full_backward_hook(lambda m, inside, outside: (inside[0].bfloat16().float(),))",
            "addmm blocks.3.mlp.0 backward 1",
            "+backward_hook_function blocks.3.mlp.1",
        ),
        (
            "detached",
            RESULT,
            "return x + self.mlp(self.norm2(x.detach() if self is model.blocks[3] else x))",
            "addmm blocks.3.attention.out backward 1",
            "-layer_norm blocks.3.norm2",
        ),
        (
            "residual detached",
            RESULT,
            "return (x.detach() if self is model.blocks[3] else x) + self.mlp(self.norm2(x))",
            "addmm blocks.3.attention.out backward 1",
            "-layer_norm blocks.3.norm2",
        ),
        ("scaled loss", "loss.backward()", "(1.01 * loss).backward()", "loss (script) forward 1", "+mul (script)"),
        (
            "one gradient zero",
            "# gradients",
            "model.blocks[2].attention.qkv.bias.grad.zero_()",
            "gradient blocks.2.attention.qkv.bias backward 1",
            "+zero_ (script)",
        ),
        (
            "clipped",
            "# gradients",
            "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
            "gradient words.weight backward 1",
            "+linalg.vector_norm (script)",
        ),
        (
            "halved in one block",
            "# gradients",
            "for p in model.blocks[9].parameters():\n    p.grad /= 2",
            "gradient blocks.9.norm1.weight backward 1",
            "+div (script)",
        ),
        (
            "not zeroed",
            "optimizer.zero_grad()",
            "step or optimizer.zero_grad()",
            "gradient words.weight backward 2",
            "+accumulate_grad (script)",
        ),
    ],
    "images": [
        (
            "rounded to fp16",
            "# gradients",
            "model.head.weight.grad = model.head.weight.grad.half().float()",
            "gradient head.weight backward 1",
            "+to (script)",
        ),
    ],
    "sequences": [
        ("state detached", "# state", "state = tuple(s.detach() for s in state)", "* lstm backward 1", "*"),
    ],
}
UPDATE = {
    "decoder": [
        ("eps", "lr=1e-3", "lr=1e-3, eps=1e-5", "AdamW words.weight update 1", ""),
        ("first beta", "lr=1e-3", "lr=1e-3, betas=(0.8, 0.999)", "AdamW words.weight update 2", ""),
        ("second beta", "lr=1e-3", "lr=1e-3, betas=(0.9, 0.95)", "AdamW words.weight update 2", ""),
        ("weight decay", "lr=1e-3", "lr=1e-3, weight_decay=0.1", "AdamW words.weight update 1", ""),
        ("learning rate", "lr=1e-3", "lr=1.01e-3", "AdamW words.weight update 1", ""),
        ("ascent", "lr=1e-3", "lr=1e-3, maximize=True", "AdamW words.weight update 1", ""),
        ("decay of the biases", PARAMETERS, OF_BIASES, "AdamW blocks.0.norm1.weight update 1", ""),
        ("learning rate of the head", PARAMETERS, OF_HEAD, "AdamW head.weight update 1", ""),
        (
            "L2 for decay",
            "AdamW(model.parameters()",
            "Adam(model.parameters(), weight_decay=0.01",
            "Adam words.weight update 1",
            "",
        ),
        (
            "schedule",
            "# gradients",
            'optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)',
            "AdamW words.weight update 2",
            "",
        ),
        (
            "a frozen bias",
            "# model",
            "model.blocks[5].mlp[0].bias.requires_grad_(False)",
            "addmm blocks.5.mlp.0 forward 2",
            "-AdamW blocks.5.mlp.0.bias",
        ),
    ],
    "images": [
        ("momentum", "momentum=0.9", "momentum=0.8", "SGD stem.weight update 2", ""),
        ("nesterov", "momentum=0.9", "momentum=0.9, nesterov=True", "SGD stem.weight update 1", ""),
        ("dampening", "momentum=0.9", "momentum=0.9, dampening=0.1", "SGD stem.weight update 2", ""),
        ("L2", "momentum=0.9", "momentum=0.9, weight_decay=1e-3", "SGD stem.weight update 1", ""),
    ],
    "masks": [
        ("alpha", "lr=1e-3", "lr=1e-3, alpha=0.9", "RMSprop down1.0.weight update 1", ""),
        ("centered", "lr=1e-3", "lr=1e-3, centered=True", "RMSprop down1.0.weight update 1", ""),
    ],
}
CASES = [
    pytest.param(Edit(name, script, old, new), at, only, id=f"{script}: {name}")
    for table in (FORWARD, BACKWARD, UPDATE)
    for script, rows in table.items()
    for name, old, new, at, only in rows
]


@pytest.mark.parametrize(("edit", "at", "only"), CASES)
def test_a_difference_is_found_where_it_begins(edit: Edit, at: str, only: str) -> None:
    a, b, found = judged(edit, steps=int(at[-1]))

    first = found.beginnings[0]
    alone = [f"-{place(a.events[n])}" for n in first.only_a] + [f"+{place(b.events[n])}" for n in first.only_b]
    assert place(b.events[first.b]).endswith(at.removeprefix("*"))
    assert bool(alone) == bool(only), alone
    assert not only or any(one.startswith(only.removesuffix("*")) for one in alone), alone
    assert found.unstable == []


def test_there_are_many_and_the_models_are_not_small() -> None:
    assert len(CASES) >= 40
    assert min(len({event.module for event in unedited(name)[0].events}) for name in ("decoder", "images")) > 100


@pytest.mark.parametrize(("edit", "at", "only"), [case for case in CASES if "decoder" not in str(case.id)])
def test_two_records_show_it_too(edit: Edit, at: str, only: str) -> None:
    """Without a control, the growth in one operation decides."""
    b = edited(edit, int(at[-1]))
    found = judge(unedited(edit.script, int(at[-1]))[0], b)
    assert place(b.events[found.beginnings[0].b]).endswith(at.removeprefix("*"))
