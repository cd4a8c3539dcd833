"""Run PaddlePaddle code that knows nothing of Mezzo under a policy: every patch of Paddle is applied and undone in this folder.

Imports no torch: that would add seconds to every run of a script that does not need it.
"""

from mezzo.launch.paddle.training import training

__all__ = ["training"]
