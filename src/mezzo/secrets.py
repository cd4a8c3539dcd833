"""What must not be written: values of arguments and variables with names of secrets, and texts that look like keys.

Some names are only a secret's (``--db-password``, ``HF_TOKEN``). ``key``, ``token`` and ``auth`` also name other things
(``--sort-key loss``, ``--mask-token x``): beside these, the value must look like a key. Without such a name, a value is a secret
if a well-known service gives such keys, or if it is an address with a password. A placeholder with the name stands in its place.

Limits: a password under another name (``-p hunter2``) is a word like any other. A hexadecimal number may be a commit, so its name decides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

_SURE = re.compile(
    r"""(?:.*[_.-])?(?:
        \w*pass(?:word|wd|phrase|code)s? | pwd | pw | secrets? | credentials? | creds | bearer | jwt | otp | pin | pat | token
        | \w*(?:api|access|secret|auth|private|encryption)[_-]?keys?(?:[_-]?id)?
        | (?:priv|license|signing|ssh|gpg|subscription|deploy|hmac|sas|aws|azure|huggingface|openai|anthropic|gemini|wandb|comet|neptune
          |clearml|ngc|kaggle|replicate|cohere|mistral|groq)[_-]?keys?
        | (?:api|access|auth|authentication|authorization|secret|bearer|refresh|session|security|personal|csrf|oauth2?|sas|hf|hub
          |huggingface|openai|anthropic|wandb|github|gitlab|gh|git|slack|telegram|discord|ngc|kaggle|mlflow|clearml|replicate|neptune|comet|databricks
          |pypi|npm|docker|vault|jupyter)[_-]?tokens?
        | (?:session|auth)[_-]?cookie | connection[_-]?string
    )(?:[_-]?(?:\d+|b64|base64|value|string|text))?""",
    re.IGNORECASE | re.VERBOSE,
)
_OF_TEXT = re.compile(
    r"(?:.*[_.-])?(?:pad|eos|bos|unk|mask|sep|cls|start|end|stop|special|extra|image|audio|video|new|prefix|suffix|first|last|next|begin|class"
    r"|control|think|user|assistant|system|tool|trigger|placeholder|split|blank|boundary|max|min|num|n|per)[_-]?tokens?",
    re.IGNORECASE,
)
"""Tokens of a vocabulary."""
_RUN_TOGETHER = re.compile(r".*(?:SECRET|BEARER|PWD|(?<!S)PIN|(?:API|ACCESS|AUTH)TOKEN)")
"""Ends of names of environment variables."""
_FOLDERS = ("PWD", "OLDPWD")
"""What shells call the working folder."""
_PERHAPS = re.compile(
    r"(?:.*[_.-])?\w*(?:keys?|tokens?|auth|authorization|cookies?|pass|sig|signature|dsn|session)", re.IGNORECASE
)
_SECOND_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VALUE = re.compile(
    r"""
    \b(?:hf|gh[poru]|npm|r8)_(?=\w*[0-9A-Z])[A-Za-z0-9]{16,}
    | \b(?:sk|glpat|pypi|nvapi|dapi|xox[abeprs])-(?=[\w-]*\d)(?=[\w-]*[A-Z]|[\da-f]{32})[\w-]{16,} | \bgithub_pat_\w{20,}
    | \bAIza[\w-]{30,} | \b(?:AKIA|ASIA)[0-9A-Z]{12,} | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*
    """,
    re.VERBOSE,
)
"""Keys of well-known services, web tokens, and private keys."""
_PASSWORD = re.compile(r"(?:(?<=://)|^)(?!mailto:)([^/\s:@'\"]*):(?!//)([^/\s@'\"]+)@(?!sha256:)(?=[\w.-]*\w)")
_USER = re.compile(r"(?<=://)(?=[^/\s:@'\"]*\d)[^/\s:@'\"]{16,}@")
"""A key in the place of a user."""
_BEARER = re.compile(r"\b(Bearer|Basic|Token)(\s+)([\w.~+/-]{8,}=*)")
"""Of a header; the last two also begin sentences."""
_QUERY = re.compile(r"""([?&])([\w.-]+)(=)([^&\s"'#]+)""")
_PAIR = re.compile(
    r"""()([A-Za-z][\w.-]*)(["']?\s*(?:=>|=|:(?!//))\s*)(?!["']?\w+://)("[^"]+"|'[^']+'|[^\s"'=,;&}\])][^\s"',;&}\])]*)"""
)
_OPTION = re.compile(r"([-+~]*)([A-Za-z][\w.-]*)=(.+)", re.DOTALL)
"""A word with a name and its whole value."""
_REFERENCE = re.compile(r"<\S*>|\[[A-Z]+\]|\$[A-Z_][A-Z0-9_]*|\$\{\w+\}?")
"""A placeholder, a token of a vocabulary, or the name of a variable."""
_FILE = re.compile(r"(?:[\w.~-]*/)*[\w.-]+\.(?:json|pem|key|crt|txt|ya?ml|toml|ini|cfg|env|conf|pub)")
_NO_VALUE = ("", "true", "false", "none", "null", "yes", "no")
_PLACEHOLDER = re.compile(r"<[A-Z0-9_-]+>")
_SHORTEST = 8
"""Shorter secrets are hidden in their place only: elsewhere a text may contain them by chance."""


def hidden(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, with placeholders for the secrets among them."""
    shown = [_hidden_word(word) for word in words]
    for place, (word, following) in enumerate(pairwise(words), 1):
        name = word.lstrip("-")
        if name != word and "=" not in word and not following.startswith("-") and is_secret(name, following):
            shown[place] = _placeholder(name)
    return tuple(shown)


def hidden_text(text: str, *, values: Iterable[str] = (), is_word: bool = False) -> str:
    """Return a text with placeholders for the secrets in it.

    Args:
        text: a message, a line of a program, or a word of a command.
        values: secrets that are known.
        is_word: whether it is a word of a command; in others, ``name = value`` counts only with quotes around the value or in an address.
    """

    def named(found: re.Match[str]) -> str:
        before, name, between, value = found.groups()
        quote = value[0] if value[0] in "\"'" else ""
        if not (is_word or before or quote) or not is_secret(name, value.strip(quote) if quote else value):
            return found[0]
        return f"{before}{name}{between}{quote}{_placeholder(name)}{quote}"

    if "=" in text or ":" in text:
        text = _USER.sub("<SECRET>@", _PASSWORD.sub(r"\1:<PASSWORD>@", text))
        text = _QUERY.sub(named, _BEARER.sub(_header, text))
        text = _PAIR.sub(named, text)
    text = _VALUE.sub("<SECRET>", text)
    for value in values:
        if value in text and is_unmistakable(value):
            text = text.replace(value, "<SECRET>")
    return text


def _hidden_word(word: str) -> str:
    option = _OPTION.fullmatch(word)
    if option is not None and is_secret(option[2], option[3]):
        return f"{option[1]}{option[2]}={_placeholder(option[2])}"
    return hidden_text(word, is_word=True)


def _header(found: re.Match[str]) -> str:
    kind, space, value = found.groups()
    return f"{kind}{space}<SECRET>" if kind == "Bearer" or looks_random(value) else found[0]


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of an option, variable or field of this name must not be written."""
    name = _SECOND_WORD.sub("_", name)
    if (
        value.lower() in _NO_VALUE
        or _REFERENCE.fullmatch(value)
        or (value.isdecimal() and len(value) < 4)
        or _FILE.fullmatch(value)
    ):
        return False
    if _OF_TEXT.fullmatch(name):
        return False
    if _SURE.fullmatch(name) or (name.isupper() and _RUN_TOGETHER.fullmatch(name)):
        return not (name.lower() == "token" and value.isdecimal())
    return _PERHAPS.fullmatch(name) is not None and looks_random(value)


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable must not be written."""
    return name not in _FOLDERS and (is_secret(name, value) or _hidden_word(value) != value)


def looks_random(value: str) -> bool:
    """Return whether a text looks like a key: letters and digits, with nearly as many bits a character as chance gives."""
    if len(value) < 12 or not re.fullmatch(r"[\w+/=.~-]*[A-Za-z][\w+/=.~-]*", value) or not re.search(r"\d", value):
        return False
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return bits > 0.8 * math.log2(min(len(value), 16 if re.fullmatch(r"[0-9a-fA-F]+", value) else 36))


def is_unmistakable(value: str) -> bool:
    """Return whether a text that contains a secret contains it on purpose."""
    return len(value) >= _SHORTEST and not (value.isalpha() and value.islower())


def secrets_among(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of a command's words and of an environment, and words that contain one, by the place where each is found."""
    found = {f"${name}": value for name, value in environment.items() if is_secret_variable(name, value)}
    for place, (word, shown) in enumerate(zip(words, hidden(words), strict=True)):
        if word == shown:
            continue
        found[f"word {place}"] = word  # a short secret is known only by the word around it
        pattern = "(.+)".join(map(re.escape, _PLACEHOLDER.split(shown)))
        values = re.fullmatch(pattern, word, re.DOTALL)
        for number, value in enumerate(values.groups() if values else ()):
            found[f"word {place} part {number}"] = value
    return found


def _placeholder(name: str) -> str:
    last = re.split(r"[.]", _SECOND_WORD.sub("-", name))[-1]
    return f"<{re.sub(r'[^A-Z0-9]+', '-', last.upper()).strip('-')}>"
