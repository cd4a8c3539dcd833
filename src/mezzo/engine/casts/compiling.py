"""Settings of torch.compile that make compiled code train as eager code does under the same policy.

They are set for the whole process, once, by the first cast table that needs them:

* Backward passes are traced with autocast off, as they run eagerly.
* AOTAutograd keeps no traces on disk: their key contains autocast's dtype, but not what our kernels do with it. Inductor's
  own cache keeps graphs with the casts in them and stays on.
* Inductor keeps every rounding where arithmetic is emulated. Between fused operations it would drop
  FP32 -> FP16 -> FP32 as pointless, and emulated products would multiply values that were never rounded: GPT-2's
  gradients then differed from FP32's by a tenth of what FP16 causes, and no overflow was ever seen.

Limit: native arithmetic is left to Inductor, so a chain of fused 16-bit operations is rounded once, at its end.
"""

from __future__ import annotations

import os
import sys


def trace_as_eager() -> None:
    """Trace backward passes with autocast off, and keep no traces across processes."""
    import torch._functorch.config as config

    config.backward_pass_autocast = "off"
    config.enable_autograd_cache = False


def keep_roundings() -> None:
    """Keep the roundings of an emulation in what Inductor compiles.

    Importing Inductor takes over a second, so if the script has not imported it, the setting is left in the environment
    for Inductor to read. Once imported, it no longer reads the environment.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        os.environ["TORCHINDUCTOR_EMULATE_PRECISION_CASTS"] = "1"
    else:
        config.emulate_precision_casts = True  # type: ignore[attr-defined]
