"""The functions that the lint observes are the ones that torch's own libraries call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from mezzo.launch.torch.lint_hooks import REDUCTIONS


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("folder", ["fsdp", "algorithms/ddp_comm_hooks"])
def test_every_reduction_of_gradients_is_observed(folder: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (Path(dist.__file__).parent / folder).rglob("*.py")]
    called = {name for source in sources for name in re.findall(r"\bdist\.(\w*reduce\w*)\(", source)}
    assert called
    assert called <= REDUCTIONS.keys()
