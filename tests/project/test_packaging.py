"""The wheel and the source archive: what they hold, and that every Python from 3.10 on that is there can install and start the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from paths import ROOT

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
WITHOUT_TORCH = (
    "numpy",
    "scipy",
    "pydantic>=2.9",
    "typer>=0.15",
    "rich>=13",
    "jinja2>=3.1",
    "matplotlib>=3.10",
    "tomli",
)
pytestmark = pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="the source tree is not beside these tests")


def python_of(version: str) -> str | None:
    """Return a Python of ``version``, on the path or among pyenv's; None without one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(str(path) for path in root.glob(f"versions/{version}.*/bin/python"))
    for candidate in [*kept, shutil.which(f"python{version}")]:
        if (
            candidate
            and subprocess.run([candidate, "-c", "import venv"], check=False, capture_output=True).returncode == 0
        ):
            return candidate
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    work = tmp_path_factory.mktemp("built")
    source = work / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return work


def source_files() -> set[str]:
    return {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "mezzo").rglob("*.py")}


@pytest.mark.slow
def test_wheel_and_source_archive_hold_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (archive,) = built.glob("*.tar.gz")
    assert source_files() <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in source_files()} <= held
    assert {"LICENSE", "README.md", "pyproject.toml"} <= held


def test_one_version_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert cited == version
    written = [path for path in ROOT.glob("src/**/*.py") if f'"{version}"' in path.read_text(encoding="utf-8")]
    assert written == []  # the package asks its metadata


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_environment_installs_and_starts(version: str, built: Path, tmp_path: Path) -> None:
    """Torch is left out: it takes gigabytes, and help, records and reports need none."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    own = str(tmp_path / "venv" / "bin" / "python")
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *WITHOUT_TORCH], check=True)
    subprocess.run([*install, "--no-deps", *map(str, built.glob("*.whl"))], check=True)
    strict = {"PYTHONWARNINGS": "error", "PYTHONPATH": ""}
    for words in (["--version"], ["--help"], ["report", "--help"]):
        command = [str(tmp_path / "venv" / "bin" / "mezzo"), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | strict)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    compiled = [
        own,
        "-W",
        "error",
        "-m",
        "compileall",
        "-q",
        "-f",
        str(tmp_path / "venv" / "lib" / f"python{version}" / "site-packages" / "mezzo"),
    ]
    assert subprocess.run(compiled, check=False).returncode == 0
