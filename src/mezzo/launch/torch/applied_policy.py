"""A policy as it is applied to a script, which keeps its own parameters."""

from __future__ import annotations

from mezzo import oplists
from mezzo.errors import PolicyError
from mezzo.policy import Policy

_FP32_UNDER_MASTERS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "loss", "binary_cross_entropy"}


def for_scripts(policy: Policy) -> Policy:
    """Return the policy as applied to a script, which keeps its own parameters.

    With master weights, a script's clipping and logging need FP32 gradients on its parameters, which 16-bit parameters cannot have.
    So the script's FP32 parameters are the masters, and everything but norms and losses is listed to run in 16 bits.
    """
    if not policy.master_weights:
        return policy
    named = {*policy.fp32, *policy.widest, *policy.lower, *_FP32_UNDER_MASTERS}
    lower = (*policy.lower, *(f.name for f in oplists.FAMILIES if f.name not in named))
    try:
        return policy.replace(casting="ops", master_weights=False, lower=lower)
    except PolicyError as error:  # a single operation of a family was named
        raise PolicyError(error.message, hint="under a -master policy, name whole families") from None
