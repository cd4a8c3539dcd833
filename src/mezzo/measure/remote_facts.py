"""What another machine can compute: ``python -m mezzo.measure.remote_facts FILE`` writes it to a file there, ``read_facts`` reads it here.

Importing this module imports no torch; running it does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mezzo.errors import RecordError
from mezzo.measure.doctor import Facts, facts
from mezzo.records.files import write_whole


def read_facts(path: Path) -> Facts:
    """Return the facts in a file.

    Raises:
        RecordError: the file is missing, or contains something else.
    """
    try:
        return TypeAdapter(Facts).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RecordError(
            f"{path} does not describe what the machine can compute: {type(error).__name__}",
            hint="type the command again; if that does not help, mezzo doctor on that machine shows why",
        ) from None


def main(arguments: Sequence[str]) -> None:
    """Write the facts of this machine to the file that the first argument names."""
    write_whole(TypeAdapter(Facts).dump_json(facts()).decode(), Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
