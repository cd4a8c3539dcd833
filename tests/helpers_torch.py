"""torch's own test tables, beside which other tests can go on.

Importing them forbids the process to set flags of ``torch.backends``, and sets environment variables such as ``NO_COLOR``.
"""

from __future__ import annotations

import os

import torch

_ENVIRONMENT = dict(os.environ)

import torch.testing._internal.common_utils  # noqa: E402 - what does both, once

torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

import torch.testing._internal.common_cuda as common_cuda  # noqa: E402

common_cuda.SM53OrLater = common_cuda.SM80OrLater = (
    True  # the tables ask for the GPU of this machine; these are the formats of an A100
)

from torch.testing._internal.autocast_test_lists import AutocastTestLists  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402

os.environ.clear()
os.environ.update(_ENVIRONMENT)

__all__ = ["AutocastTestLists", "module_db", "op_db"]
