"""Files of libraries beside those of a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mezzo.library_files import is_library_file


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/home/me/project/config.json", False),
        ("/home/me/project/checkpoint.pt", False),
        ("/usr/src/app/config.json", False),  # a script's, though Python is installed in /usr
        ("/usr/share/fonts.json", True),
        ("/home/me/env/lib/python3.11/site-packages/a/config.json", True),
        ("/home/me/project/__pycache__/a.pyc", True),
        ("/home/me/cache/matplotlib/fontlist.json", True),
        ("/home/me/cached.json", False),
        ("/home/me/mpl/fontlist.json", True),
    ],
)
def test_a_file_is_a_librarys_or_the_scripts(path: str, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/env")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    monkeypatch.setenv("MPLCONFIGDIR", "/home/me/mpl")
    assert is_library_file(path) == is_one


def test_a_user_may_have_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert not is_library_file("/project/config.json")


def test_a_folder_behind_a_link_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "link"))
    assert is_library_file(str(tmp_path / "link" / "config.json"))
    assert is_library_file(str(tmp_path / "real" / "config.json"))
