"""Options that change a script's models from outside, and the scripts that they apply to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.cli.ranks import refuse_in_several
from mezzo.errors import ScriptError

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request_parts import ModelChanges


def changes_of(
    script: Script, *, channels_last: bool = False, compiles: bool = False, checkpoint: str = ""
) -> ModelChanges | None:
    """Return the requested changes to the script's models; None if there are none.

    Raises:
        ScriptError: the models of this script cannot be changed.
    """
    from mezzo.launch.request_parts import ModelChanges

    requested = {
        "--channels-last": channels_last,
        "--compile": compiles,
        f"--checkpoint {checkpoint}": bool(checkpoint),
    }
    option = next((name for name, wanted in requested.items() if wanted), None)
    if option is None:
        return None
    if script.framework != "torch":
        raise ScriptError(
            f"{option} was given for a script in {script.framework}; allowed: PyTorch scripts",
            hint=f"leave {option} out",
        )
    refuse_in_several(option, hint="make the change in the script, before it makes its models parallel")
    return ModelChanges(channels_last=channels_last, compiles=compiles, checkpoint=checkpoint)
