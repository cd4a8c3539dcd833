"""Tests that need torch's CUDA build, but no GPU: ``make test-cuda-build`` runs them."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them on a CPU build."""
    if torch.version.cuda is None:
        for item in items:
            if item.get_closest_marker("cuda_build"):
                item.add_marker(pytest.mark.skip(reason="needs torch's CUDA build: make test-cuda-build"))
