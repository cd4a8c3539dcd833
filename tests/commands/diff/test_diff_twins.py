"""A rewrite that rounding alone tells from the script is not blamed; the same script is identical."""

from __future__ import annotations

import pytest

from helpers_diff import Edit, judged, place, text_of, unedited, values_of
from mezzo.commands.diff.answer import verdict_of
from mezzo.commands.diff.judge import judge

MASK = 'masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))'
IN_EACH = "for m in model.modules():\n    if isinstance(m, %s):\n        m.%s = (lambda m: lambda %s)(m)"
NORM = "(x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + m.eps).rsqrt() * m.weight + m.bias"
OF_IMAGES = (
    "(x - x.mean((0, 2, 3), keepdim=True)) * (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).rsqrt()"
    " * m.weight[:, None, None] + m.bias[:, None, None]"
)
LOSS = "F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())"
ONCE = "    loss = loss_of(model(ids), ids)\n    loss.backward()\n"
PARTS = "    for part in ids.chunk(2):\n        loss = loss_of(model(part), part) / 2\n        loss.backward()\n"
PARAMETERS = "AdamW(model.parameters(), lr=1e-3)"
BY_SHAPE = 'AdamW([{"params": [p for p in model.parameters() if p.ndim == n]} for n in (1, 2)], lr=1e-3)'
TWINS = {
    "decoder": [
        (
            "attention by parts",
            "# model",
            IN_EACH % ("Attention", "mix", f"q, k, v: (q @ k.mT / 8**0.5).{MASK}.softmax(-1) @ v"),
        ),
        (
            "queries scaled before",
            "# model",
            IN_EACH % ("Attention", "mix", f"q, k, v: ((0.3 * q) @ k.mT / (0.3 * 8**0.5)).{MASK}.softmax(-1) @ v"),
        ),
        (
            "mask of numbers",
            "# model",
            IN_EACH
            % (
                "Attention",
                "mix",
                f"q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(12, 12).{MASK})",
            ),
        ),
        ("norms by parts", "# model", IN_EACH % ("nn.LayerNorm", "forward", f"x: {NORM}")),
        ("gelu by parts", "# model", IN_EACH % ("nn.GELU", "forward", "x: x * 0.5 * (1 + torch.erf(x / 2**0.5))")),
        ("loss by log-probabilities", LOSS, "-logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()"),
        (
            "loss by its normaliser",
            LOSS,
            "(logits[:, :-1].logsumexp(-1) - logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)).mean()",
        ),
        ("loss in FP64", "logits[:, :-1].flatten(0, 1)", "logits[:, :-1].flatten(0, 1).double()"),
        ("micro-batches", ONCE, PARTS),
        ("einsum", "return self.head(x)", 'return torch.einsum("btd,wd->btw", x, self.head.weight)'),
        (
            "three products",
            "return self.qkv(x).chunk(3, -1)",
            "return [F.linear(x, w, b) for w, b in zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3))]",
        ),
        ("columns apart", "self.head(x)", "torch.cat([F.linear(x, w) for w in self.head.weight.split(8)], -1)"),
        (
            "sums in halves",
            "self.head(x)",
            "x[..., :8] @ self.head.weight[:, :8].T + x[..., 8:] @ self.head.weight[:, 8:].T",
        ),
        ("product in FP64", "self.head(x)", "(x.double() @ self.head.weight.double().T).float()"),
        ("checkpointed", "x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
        (
            "checkpointed reentrantly",
            "x = block(x)",
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)",
        ),
        ("residual last", "return x + self.mlp(self.norm2(x))", "return self.mlp(self.norm2(x)) + x"),
        ("words by a product", "self.words(ids) +", "F.one_hot(ids, 23).float() @ self.words.weight +"),
        ("words by index", "self.words(ids) +", "self.words.weight[ids] +"),
        (
            "sequence first",
            "self.attention(self.norm1(x))",
            "self.attention(self.norm1(x.transpose(0, 1)).transpose(0, 1))",
        ),
        (
            "renamed",
            "# model",
            "model.layers = model.blocks\ndel model.blocks\nmodel.__dict__['blocks'] = model.layers",
        ),
        ("parameter after parameter", "lr=1e-3", "lr=1e-3, foreach=False"),
        ("all parameters at once", "lr=1e-3", "lr=1e-3, foreach=True"),
        ("fused", "lr=1e-3", "lr=1e-3, fused=True"),
        ("two groups", PARAMETERS, BY_SHAPE),
        ("clipped far above", "# gradients", "nn.utils.clip_grad_norm_(model.parameters(), 1e9)"),
    ],
    "images": [
        ("images channels-last", "# data", "x = x.contiguous(memory_format=torch.channels_last)"),
        ("model channels-last", "# model", "model = model.to(memory_format=torch.channels_last)"),
        ("one norm by parts", "# model", f"m = model.blocks[4].norm1\nm.forward = lambda x: {OF_IMAGES}"),
        (
            "convolution by columns",
            "# model",
            "m = model.blocks[4].conv1\nm.forward = lambda x: (m.weight.flatten(1) @ F.unfold(x, 3, padding=1)).view_as(x)",
        ),
        (
            "relu behind the pool",
            "self.pool(F.relu(self.norm(self.stem(x))))",
            "F.relu(self.pool(self.norm(self.stem(x))))",
        ),
        ("clamp for relu", "# model", IN_EACH % ("nn.ReLU", "forward", "x: x.clamp(min=0)")),
        ("mean for a pool", "self.average(self.blocks(x)).flatten(1)", "self.blocks(x).mean((2, 3))"),
        ("image by image", "self.norm(self.stem(x))", "self.norm(torch.cat([self.stem(one) for one in x.split(1)]))"),
        ("parameter after parameter", "momentum=0.9", "momentum=0.9, foreach=False"),
        ("fused", "momentum=0.9", "momentum=0.9, fused=True"),
    ],
    "sequences": [
        (
            "one call",
            "self.norm(torch.cat([first, second], 1))",
            "self.norm(self.lstm(self.words(ids))[0])",
        ),
    ],
    "masks": [
        ("size for scale", "scale_factor=2", "size=(2 * x.shape[2], 2 * x.shape[3])"),
        ("silu by parts", "# model", IN_EACH % ("nn.SiLU", "forward", "x: x * torch.sigmoid(x)")),
        (
            "loss by parts",
            "F.binary_cross_entropy_with_logits(model(x), y)",
            "(lambda z: (F.softplus(-z) + (1 - y) * z).mean())(model(x))",
        ),
    ],
}
TWICE = (
    "attention by parts",
    "norms by parts",
    "micro-batches",
    "parameter after parameter",
    "all parameters at once",
    "fused",
    "two groups",
)
"""Rewrites of the decoder that are compared over two steps; the others over one."""
CASES = [
    pytest.param(Edit(n, s, old, new), 2 if s != "decoder" or n in TWICE else 1, id=f"{s}: {n}")
    for s, rows in TWINS.items()
    for n, old, new in rows
]


@pytest.mark.parametrize(("edit", "steps"), CASES)
def test_rounding_is_not_blamed(edit: Edit, steps: int) -> None:
    a, b, found = judged(edit, steps=steps)
    assert [place(a.events[one.a]) for one in found.beginnings] == []
    assert verdict_of(a, found) in ("rounding", "identical")
    assert judge(a, b).beginnings == []  # as two records say it, without a control


@pytest.mark.parametrize("script", ["decoder", "images", "sequences", "masks"])
def test_the_same_script_is_identical(script: str) -> None:
    a, again, control = unedited(script)
    found = judge(a, again, again=again, control=control)
    assert (verdict_of(a, found), found.first, len(found.pairs)) == ("identical", None, len(a.events))


def test_the_order_of_a_sum_is_found_but_not_blamed() -> None:
    m = "m = model.blocks[2].mlp[2]\nm.forward = lambda x: "
    sums = "x[..., :32] @ m.weight[:, :32].T + x[..., 32:] @ m.weight[:, 32:].T + m.bias"
    _, b, found = judged(Edit("sums in halves", "decoder", "# model", m + sums), steps=1)
    assert found.beginnings == []
    assert found.first is not None
    assert place(b.events[found.first[1]]) == "add blocks.2.mlp.2 forward 1"


def test_a_scaled_loss_is_another_loss_and_nothing_else() -> None:
    scaled = ONCE.replace("loss.backward()", "(1024 * loss).backward()")
    divided = "    for p in model.parameters():\n        p.grad /= 1024\n"
    a, b, found = judged(Edit("scaled and divided", "decoder", ONCE, scaled + divided), steps=1)
    assert [place(b.events[one.b]) for one in found.beginnings] == ["loss (script) forward 1"]
    assert [place(b.events[n]) for n in found.beginnings[0].only_b] == ["mul (script) forward 1"]
    assert all(found.distance[n] <= found.allowed[n] for n in found.pairs if a.events[n].kind == "gradient")


OWN_SCALER = (
    ("optimizer = torch", "scaler = torch.amp.GradScaler('cpu')\noptimizer = torch"),
    ("loss.backward()", "scaler.scale(loss).backward()"),
    ("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"),
)


@pytest.mark.parametrize(
    ("script", "a", "b", "own_scaler"),
    [
        ("decoder", "fp32", "fp16", False),
        ("decoder", "fp16", "bf16", False),
        ("sequences", "fp32", "fp16", False),
        ("masks", "fp32", "fp16", False),
        ("masks", "fp16", "bf16", False),
        ("masks", "bf16", "fp16-master", False),
        ("masks", None, "fp16", True),
        ("masks", "fp16", None, True),
        ("masks", None, "bf16", True),
    ],
)
def test_a_loss_scale_is_no_difference(script: str, a: str | None, b: str | None, own_scaler: bool) -> None:
    """Powers of two multiply a backward pass; the script's own scaler multiplies its loss too."""
    text = text_of(script)
    for old, new in OWN_SCALER if own_scaler else ():
        text = text.replace(old, new)
    first, again = values_of(text, policy=a), values_of(text, policy=a)
    second, control = values_of(text, policy=b), values_of(text, policy=b or a, mirrored=True)
    found = judge(first, second, again=again, control=control, control_of_b=b is not None, same_formats=False)
    assert [place(first.events[one.a]) for one in found.beginnings] == []
    assert verdict_of(first, found) == "rounding"
    read = {read.event for event in second.events if event.kind == "gradient" for read in event.reads}
    assert read
    assert all(second.events[n].kind != "data" for n in read)  # what a gradient is computed from is known


def test_a_wrong_scale_is_a_difference() -> None:
    """A gradient that stays multiplied is found, whatever the loss scale."""
    text = text_of("masks")
    wrong = text.replace("# gradients", "model.out.bias.grad *= 65536.0")
    first, again, second = values_of(text), values_of(text), values_of(wrong, policy="fp16")
    control = values_of(wrong, policy="fp16", mirrored=True)
    found = judge(first, second, again=again, control=control, control_of_b=True, same_formats=False)
    assert [place(first.events[one.a]) for one in found.beginnings[:1]] == ["gradient out.bias backward 1"]
