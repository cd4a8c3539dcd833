"""The libraries that a script imports first are imported once for its runs, and by nothing that would see a difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mezzo.children import script_text as module
from mezzo.children.script_text import shared_libraries


@pytest.mark.parametrize(
    ("text", "others", "found"),
    [
        ('"""What it does."""\nimport torch\nfrom scipy.special import erf\n', {}, ["scipy.special"]),
        ("import scipy, os\n", {}, ["scipy"]),
        ("import torch\n", {}, []),
        ("import os\nos.environ['HOME'] = '/tmp'\nimport scipy\n", {}, []),
        ("from pathlib import Path\nif Path('x').exists():\n    import scipy\n", {}, []),
        ("def late():\n    import scipy\n", {}, []),
        ("import settings\nimport scipy\n", {"settings.py": ""}, []),
        ("import settings\nimport scipy\n", {"settings/__init__.py": ""}, []),
        ("import scipy\nimport settings\n", {"settings.py": ""}, ["scipy"]),
        ("import scipy\n", {"scipy.py": ""}, []),
        ("import scipy\nprint('SCIPY_ARRAY_API')\n", {}, []),
        ("import scipy\n", {"other.py": "SCIPY_ARRAY_API = 1"}, []),
        ("from . import scipy\n", {}, []),
        ("import scipy\nthis is no Python\n", {}, []),
    ],
)
def test_what_is_imported_before_anything_of_its_own(
    text: str, others: dict[str, str], found: list[str], tmp_path: Path
) -> None:
    for name, content in {"train.py": text, **others}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert shared_libraries(str(tmp_path / "train.py"), kind="script") == found


def test_a_library_that_is_not_installed_is_left_to_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._READS, "no_such_library", "NONE_")
    (tmp_path / "train.py").write_text("import no_such_library\n", encoding="utf-8")
    assert shared_libraries(str(tmp_path / "train.py"), kind="script") == []


def test_a_script_that_does_not_exist_has_none(tmp_path: Path) -> None:
    assert shared_libraries(os.fspath(tmp_path / "no.py"), kind="script") == []
    assert shared_libraries("no_such_module", kind="module") == []
