"""Run a script with ``apex`` provided: ``python -m mezzo.compat.apex [--without-amp] [-m] script [arguments]``.

``--without-amp`` provides ``apex.amp`` without effect, for ``mezzo run`` and the other commands, whose policy replaces it.
"""

from __future__ import annotations

import importlib
import sys

from mezzo.as_python import run_as_python
from mezzo.errors import MezzoError, UsageError
from mezzo.launch.request import WITHOUT_AMP
from mezzo.launch.targets import Target, check_target

MODULES = {
    "apex": "mezzo.compat.apex",
    "apex.amp": "mezzo.compat.apex.amp",
    "apex.amp._amp_state": "mezzo.compat.apex.amp.state",
    "apex.amp.scaler": "mezzo.compat.apex.amp.state",
    "apex.normalization": "mezzo.compat.apex.normalization",
    "apex.normalization.fused_layer_norm": "mezzo.compat.apex.normalization",
    "apex.optimizers": "mezzo.compat.apex.optimizers",
    "apex.parallel": "mezzo.compat.apex.parallel",
    "apex.parallel.LARC": "mezzo.compat.apex.parallel.LARC",
}
"""The modules that a script imports, with the ones that it gets."""


def install_aliases() -> None:
    """Make ``import apex`` find this package, in this process."""
    for name, own in MODULES.items():
        sys.modules[name] = importlib.import_module(own)


def main(arguments: list[str]) -> None:
    """Run the script or module that ``arguments`` name after the options; it sees the rest as its own.

    Raises:
        UsageError: none is named, or it does not exist.
    """
    without_amp = arguments[:1] == [WITHOUT_AMP]
    rest = arguments[1:] if without_amp else arguments
    module = rest[:1] == ["-m"]
    rest = rest[1:] if module else rest
    if not rest:
        raise UsageError(
            f"python -m mezzo.compat.apex got {' '.join(arguments) or 'nothing'}; allowed: [{WITHOUT_AMP}] [-m] script [arguments]",
            hint="pass the script that imports apex, or -m and the name of a module",
        )
    check_target(Target(rest[0], module=module, arguments=rest[1:], typed=("python", "-m", "mezzo.compat.apex")))
    install_aliases()
    if without_amp:
        from mezzo.compat.apex.amp.state import _amp_state

        _amp_state.replaced_by_policy = True
    sys.argv = rest
    run_as_python(rest[0], module=module)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MezzoError as error:
        print(f"mezzo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
