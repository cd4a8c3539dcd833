"""Run a script with ``apex`` provided: ``python -m mezzo.compat.apex [-m] script [arguments]``."""

from __future__ import annotations

import sys

from mezzo.children.as_python import run_as_python
from mezzo.compat.apex import provide
from mezzo.errors import MezzoError, UsageError
from mezzo.launch.targets import Target, check_target


def main(arguments: list[str]) -> None:
    """Run the script or module that ``arguments`` name; it sees the rest as its own.

    Raises:
        UsageError: none is named, or it does not exist.
    """
    module = arguments[:1] == ["-m"]
    rest = arguments[1:] if module else arguments
    if not rest:
        raise UsageError(
            f"python -m mezzo.compat.apex got {' '.join(arguments) or 'nothing'}; allowed: [-m] script [arguments]",
            hint="pass the script that imports apex, or -m and the name of a module",
        )
    check_target(Target(rest[0], module=module, arguments=rest[1:], typed=("python", "-m", "mezzo.compat.apex")))
    provide()
    sys.argv = rest
    run_as_python(rest[0], module=module)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MezzoError as error:
        print(f"mezzo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
