"""Where the tests find the project's files, wherever the test itself lies."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SCRIPTS = TESTS / "scripts"
FAULTS = TESTS / "faults"
