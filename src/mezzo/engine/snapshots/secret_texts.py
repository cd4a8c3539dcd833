"""Secrets among the texts that a script holds: a snapshot names where set-up has one from, and a resumed run takes it from there.

They are those of the script's arguments and of the environment, and those that set-up keeps under the name of a secret, also as part of a
longer text (``f"Bearer {key}"``). Limits: numbers, and secrets that only the loop makes, are saved as they are; the file is its owner's.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from mezzo.errors import SnapshotError
from mezzo.secrets import is_secret, is_unmistakable, secrets_among


class SecretTexts:
    """The secrets that set-up has, and where each is found."""

    def __init__(self) -> None:
        """Begin with the script's arguments and the environment."""
        self._places: dict[str, str] = {}
        for place, value in secrets_among(sys.argv[1:], os.environ).items():
            if is_unmistakable(value) or not place.startswith("$"):  # any variable may have a short word for a value
                self._places.setdefault(value, place)
        self._inside: re.Pattern[str] | None = None

    def note(self, value: Any, name: str, place: str) -> None:
        """Note what set-up keeps under a name, if that is the name of a secret."""
        if type(value) is str and is_secret(name, value):
            self._places.setdefault(value, place)
            self._inside = None

    def written(self, value: str | bytes) -> list[Any] | None:
        """Return a text with places instead of its secrets, as JSON; None if there is no secret in it."""
        if not self._places:
            return None
        text = value if isinstance(value, str) else value.decode("latin-1")
        if text in self._places:
            return ["secret", type(value).__name__, "", self._places[text], ""]
        if self._inside is None:
            long = sorted(filter(is_unmistakable, self._places), key=len, reverse=True)
            self._inside = re.compile("|".join(map(re.escape, long)) or "(?!)")
        parts = self._inside.split(text)
        if len(parts) == 1:
            return None
        found = [self._places[one] for one in self._inside.findall(text)]
        mixed = [one for pair in zip(parts, [*found, ""], strict=True) for one in pair]
        return ["secret", type(value).__name__, *mixed[:-1]]

    def read(self, written: list[Any]) -> str | bytes:
        """Return the text again.

        Raises:
            SnapshotError: set-up has no secret at one of its places.
        """
        values = {place: value for value, place in self._places.items()}
        _, kind, *parts = written
        for place in parts[1::2]:
            if place not in values:
                raise SnapshotError(
                    f"the secret {place!r} is not there; a snapshot does not keep it",
                    hint="resume with the arguments and environment variables of the run",
                )
        text = "".join(values[part] if number % 2 else part for number, part in enumerate(parts))
        return text if kind == "str" else text.encode("latin-1")
