"""Score fixed inputs with a small model of a public architecture: score.py gpt2|llama|vit|unet|t5.

Decoders score the same tokens twice: all at once, as training does, and one after another with a cache, as generation does.
"""

from __future__ import annotations

import sys

import torch
import transformers
from torch import Tensor, nn

import mezzo

TOKENS, BATCH, VOCABULARY = 48, 4, 512
SIZES = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}


class UNet(nn.Module):
    """Two levels down and up, with skips (Ronneberger et al., arXiv:1505.04597), and group norms."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2, self.up1 = self._block(6 * width, 2 * width), self._block(3 * width, width)
        self.out = nn.Conv2d(width, 10, 1)

    @staticmethod
    def _block(inside: int, out: int) -> nn.Sequential:
        layers = [nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(nn.functional.max_pool2d(one, 2))
        middle = self.middle(nn.functional.max_pool2d(two, 2))
        up = self.up2(torch.cat([nn.functional.interpolate(middle, scale_factor=2), two], 1))
        return self.out(self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2), one], 1)))


def decoder(name: str) -> nn.Module:
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=128, n_layer=6, n_head=4)
        return transformers.GPT2LMHeadModel(config)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES)
    )


def score_decoder(model: nn.Module) -> None:
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    mezzo.compare_point("logprobs", model(input_ids=tokens).logits.float().log_softmax(-1))
    cache, one_by_one = None, []
    for place in range(TOKENS):
        answer = model(input_ids=tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        one_by_one.append(answer.logits)
    mezzo.compare_point("logprobs", torch.cat(one_by_one, 1).float().log_softmax(-1))


def score(name: str) -> None:
    torch.manual_seed(0)
    if name in ("gpt2", "llama"):
        score_decoder(decoder(name).eval())
    elif name == "t5":
        config = transformers.T5Config(vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_heads=4)
        tokens = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS))
        model = transformers.T5ForConditionalGeneration(config).eval()
        logits = model(input_ids=tokens[0], decoder_input_ids=tokens[1]).logits
        mezzo.compare_point("logprobs", logits.float().log_softmax(-1))
    elif name == "vit":
        config = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=100, **SIZES)
        logits = transformers.ViTForImageClassification(config).eval()(pixel_values=torch.randn(8, 3, 32, 32)).logits
        mezzo.compare_point("logprobs", logits.float().log_softmax(-1))
    else:
        mezzo.compare_point("logprobs", UNet().eval()(torch.randn(4, 3, 32, 32)).float().log_softmax(1))


if __name__ == "__main__":
    with torch.no_grad():
        score(sys.argv[1])
