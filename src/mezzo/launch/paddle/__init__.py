"""Run PaddlePaddle code that knows nothing of Mezzo under a policy: every patch of Paddle is made in this folder and undone.

Imports no torch: it would add seconds to every run of a script that needs none.
"""

from mezzo.launch.paddle.training import training

__all__ = ["training"]
