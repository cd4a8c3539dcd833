"""torch's own test tables, beside which other tests can go on: importing them forbids the process to set flags of ``torch.backends``."""

from __future__ import annotations

import torch
import torch.testing._internal.common_utils  # what forbids it, once

torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

from torch.testing._internal.autocast_test_lists import AutocastTestLists  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

__all__ = ["AutocastTestLists", "op_db"]
