"""Which values of an FP32 step of a Paddle script would have 16 bits under a policy's op lists.

The result of an operation in the lower-precision list has 16 bits, that of one in the FP32 list has 32, and that of any other has the
widest format of its operands; code outside layers is FP32. A weight's gradient has 16 bits if an operation in the lower list reads the
weight. The result of batch normalisation has the format of its first operand, whatever the format of its weights.
"""

from __future__ import annotations

from typing import Any

from mezzo.frameworks import paddle_ops
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.paddle.tape import Listener, TapedOperation
from mezzo.policy import Policy

_FOLLOW_FIRST = ("batch_norm", "instance_norm", "prelu")
"""Operations whose result has the format of their first operand."""


class ListedFormats(Listener):
    """The formats that a step's tensors would have; nothing is rounded, and the script runs in FP32."""

    def __init__(self, policy: Policy, run: PaddleRun) -> None:
        self._run = run
        self._lowers = policy.lowers
        self._precisions = paddle_ops.precisions(paddle_ops.for_scripts(policy))
        self._wide: dict[int, tuple[Any, bool]] = {}
        """Whether a tensor is FP32, by its id; the tensors are kept alive."""
        self._lowered: dict[int, Any] = {}
        """Weights that an operation in the lower list reads."""

    def forget(self) -> None:
        """Drop the tensors of a step that is over."""
        self._wide.clear()

    def is_wide(self, tensor: Any) -> bool:
        """Return whether ``tensor`` stays in FP32 under the policy; a tensor that no operation returned does."""
        return self._wide.get(id(tensor), (tensor, True))[1] and self._lowers

    def gradient_is_wide(self, parameter: Any) -> bool:
        """Return whether a parameter's gradient is FP32, because no operation in the lower list reads the parameter."""
        return id(parameter) not in self._lowered and self._lowers

    def finished(self, operation: TapedOperation) -> None:
        """Record the format that an operation's results would have."""
        wide = self._is_wide(operation)
        for result in operation.results:
            self._wide[id(result)] = result, wide
        if not wide and self._precisions.get(operation.name) == "lower":
            self._lowered.update({id(t): t for t in operation.operands})

    def _is_wide(self, operation: TapedOperation) -> bool:
        precision = self._precisions.get(operation.name, "follow")
        if not self._run.local.depth or precision == "fp32":
            return True
        if precision == "lower":
            return False
        read = [t for t in operation.operands if t.is_floating_point()]
        decisive = read[:1] if operation.name in _FOLLOW_FIRST else read
        return not decisive or any(self._wide.get(id(t), (t, True))[1] for t in decisive)
