"""A tokenizer of twenty words and a few sentences, for the scripts of text models next to this file; nothing is downloaded."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "the a cat dog bird tree house river sees likes finds hears big small red blue old new and .".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows ``WORDS``."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def sentences(count: int) -> list[str]:
    """Return sentences of eight random words."""
    draws = np.random.default_rng(0)
    return [" ".join(draws.choice(WORDS[:-1], size=8)) + " ." for _ in range(count)]
