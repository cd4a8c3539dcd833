"""Change a run's policy between two steps.

The next call of a model begins its region under the new policy, and the next backward pass has its loss scale. Two effects of the old
policy remain: the modules that it kept in FP32 stay in FP32, and the script's GradScalers stay off.
"""

from __future__ import annotations

import torch

from mezzo.engine.session_guard import SaferPolicy, policy_note, safer_policy, unchanged_policy
from mezzo.launch.torch.restoring import find_premade
from mezzo.launch.torch.state import TorchRun
from mezzo.records import AlarmKind


def fall_back(run: TorchRun, kind: AlarmKind) -> SaferPolicy:
    """Change a run's policy to the next safer one after an alarm, if there is one; return the result, with the reason."""
    now = run.precision.present
    obstacle = "the precision is the script's own" if now is None else _obstacle(run)
    if not obstacle and now is not None:
        safer = safer_policy(now, kind, run.precision.device_type or "cpu")
        if not isinstance(safer, str):
            policy, why = safer
            run.change_policy(policy, why)
            return SaferPolicy(changed=True, note=policy_note(f"{policy!s}, before {now!s}", why))
        obstacle = safer
    return unchanged_policy(obstacle)


def _obstacle(run: TorchRun) -> str:
    """Return why a run cannot change its policy now; empty if it can."""
    if torch.is_autocast_enabled(run.precision.device_type or "cpu"):
        return "the loop runs in an autocast region that the script opened around it"
    if find_premade(torch.cuda.CUDAGraph)[0]:
        return "the script replays CUDA graphs, which keep the policy that they were captured under"
    return ""
