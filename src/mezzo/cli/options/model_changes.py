"""Options that change a script's models from outside, and the scripts that they apply to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.cli.ranks import refuse_in_several

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request import ModelChanges


def changes_of(
    script: Script, *, channels_last: bool = False, compiles: bool = False, checkpoint: str = ""
) -> ModelChanges | None:
    """Return the requested changes to the script's models; None if there are none.

    Raises:
        ScriptError: the models of this script cannot be changed.
    """
    from mezzo.launch.request import ModelChanges

    requested = {
        "--channels-last": channels_last,
        "--compile": compiles,
        f"--checkpoint {checkpoint}": bool(checkpoint),
    }
    option = next((name for name, wanted in requested.items() if wanted), None)
    if option is None:
        return None
    script.check_supported(option.split()[0])
    refuse_in_several(option, hint="make the change in the script, before it makes its models parallel")
    return ModelChanges(channels_last=channels_last, compiles=compiles, checkpoint=checkpoint)
