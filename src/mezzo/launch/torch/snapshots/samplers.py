"""The state of a script's own samplers when a pass over a loader begins, which its order follows from."""

from __future__ import annotations

import json
from typing import Any

from mezzo.engine.snapshots.structure import put_together, take_apart
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.iterators import samplers_of
from mezzo.launch.torch.snapshots.restore import Restoration
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.walk import Walk, base_of


def capture_samplers(files: OwnFiles, loader: Any) -> dict[str, Any] | None:
    """Return the state of a loader's samplers; None if all are torch's own."""
    samplers = samplers_of(loader)
    if not samplers:
        return None
    found = _walked(files, loader)
    written = Walk(files, base_of(found, []), limit=len(found.objects))
    written.opaque = {id(getattr(loader, "dataset", None))}
    written.variables(_named(samplers), "")
    copies = {name: tensor.detach().clone() for name, tensor in written.tensors.items()}
    tree, tensors = take_apart({"rows": written.rows, "tensors": copies})
    return {"tree": json.dumps(tree), "tensors": tensors}


def begin_samplers(files: OwnFiles, loader: Any, saved: dict[str, Any] | None) -> None:
    """Give a loader's samplers the state that a pass began with."""
    if saved is None:
        return
    contents = put_together(json.loads(saved["tree"]), saved["tensors"])
    found = _walked(files, loader)
    present = dict(enumerate(found.objects))
    restoration = Restoration(files, contents["rows"], contents["tensors"], present, _lost)
    restoration.secrets = found.secrets
    restoration.fill(0, len(contents["rows"]))


def _walked(files: OwnFiles, loader: Any) -> Walk:
    walk = Walk(files)
    walk.opaque = {id(getattr(loader, "dataset", None))}
    walk.variables(_named(samplers_of(loader)), "")
    return walk


def _named(samplers: list[Any]) -> dict[str, Any]:
    return {f"sampler {number}": sampler for number, sampler in enumerate(samplers)}


def _lost(number: int) -> SnapshotError:
    return SnapshotError(
        "a sampler of the DataLoader is not the one of the run to resume",
        hint="resume with the same script and the same data",
    )
