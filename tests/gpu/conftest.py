"""The processes that tests on a GPU wait for, started once a session."""

from collections.abc import Iterator

import pytest
from gpu_jobs import Ask, Jobs


@pytest.fixture(scope="session")
def _jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    made = Jobs(list(dict.fromkeys(item.path.stem for item in request.session.items if item.get_closest_marker("gpu"))))
    yield made
    made.end()


@pytest.fixture
def ended(request: pytest.FixtureRequest, _jobs: Jobs) -> Ask:
    """Return a process of this test's module, by its name and device, once it has ended."""
    return lambda name, device: _jobs.of(request.path.stem, name, device)
