"""Tests of other frameworks run where these are installed: ``make test-frameworks`` builds an environment for each."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [f"test_{name}*.py" for name in ("keras", "paddle") if importlib.util.find_spec(name) is None]
