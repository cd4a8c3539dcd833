"""``apex.amp`` as of its last release, over Mezzo's engine."""

from mezzo.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from mezzo.compat.apex.amp.handle import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from mezzo.compat.apex.amp.optimizers import scale_loss
from mezzo.compat.apex.amp.state import _amp_state, master_params

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
