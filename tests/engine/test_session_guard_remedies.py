"""What changes after each return to a snapshot, and when the policy does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.engine.scaling import DynamicScale, NoScale
from mezzo.engine.session_guard import SaferPolicy, apply_remedy, policy_note, unchanged_policy
from mezzo.records import AlarmKind, Note, Rewind

SAFER, NONE = SaferPolicy(changed=True, note=policy_note("bf16", "r")), unchanged_policy("none")

# Alarm, whether the scale is dynamic, whether there is a safer policy, and the changes of three returns to one snapshot.
CASES: list[tuple[AlarmKind, bool, bool, list[list[str]]]] = [
    ("loss spike", True, True, [["rate x 0.5"], ["rate x 0.5", "bf16"], ["rate x 0.25"]]),
    ("loss spike", True, False, [["rate x 0.5"], ["rate x 0.25", "unchanged"], ["rate x 0.125"]]),
    ("skip storm", True, True, [["scale x 0.0625"], ["bf16"], ["scale x 0.00390625"]]),
    ("skip storm", True, False, [["scale x 0.0625"], ["scale x 0.00390625", "unchanged"], ["scale x 0.000244141"]]),
    ("scale at its floor", True, True, [["bf16"], ["bf16"], ["bf16"]]),
    ("scale at its floor", True, False, [["scale x 0.0625", "unchanged"], ["scale x 0.00390625", "unchanged"]]),
    ("gradients zero", True, True, [["scale x 16"], ["bf16"], ["scale x 256"]]),
    ("gradients zero", False, True, [["bf16"]]),
    ("gradients zero", False, False, [[]]),
]


@pytest.mark.parametrize(("kind", "scaled", "safer", "expected"), CASES)
def test_the_changes_of_each_return(kind: AlarmKind, scaled: bool, safer: bool, expected: list[list[str]]) -> None:
    before: list[Rewind] = []
    for changes in expected:
        found, changed_policy = apply_remedy(
            kind,
            before,
            optimizers=[torch.optim.SGD([torch.zeros(1)], lr=1.0)],
            schedulers=[],
            scales=[DynamicScale() if scaled else NoScale()],
            fall_back=lambda: SAFER if safer else NONE,
        )
        assert [_short(one) for one in found] == changes
        assert changed_policy == ("bf16" in changes)
        rewind = Rewind(alarm=kind, step=1, snapshot="a", updates=1, changes=found, changed_policy=changed_policy)
        before.append(rewind)


def _short(change: Note) -> Any:
    what = {"learning rate": "rate ", "loss scale": "scale "}.get(change.what, "")
    return f"{what}{change.value.split(',')[0]}"
