"""The wheel and the source archive: what they hold, and that every Python from 3.10 on that is there can install and start the wheel."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mezzo
from mezzo.version import VERSION
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


def names_in(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def sums_in(built: Path) -> dict[str, int]:
    """Return the checksum of every file in the wheel."""
    (wheel,) = built.glob("*.whl")
    return {info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist()}


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


def python_or_skip(version: str) -> str:
    return python_of(version) or pytest.skip(f"there is no Python {version}")


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
    """Return every module, template, kernel and table, as the wheel names them."""
    files = (path for path in (ROOT / "src" / "mezzo").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT / "src").as_posix() for path in files}


@pytest.mark.slow
def test_wheel_and_source_archive_hold_every_file(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    assert archive.name == f"mezzo-{VERSION}.tar.gz"
    assert source_files() <= names_in(built)
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in source_files()} <= held
    assert {"LICENSE", "README.md", "pyproject.toml"} <= held
    information = f"mezzo-{VERSION}.dist-info"
    beside = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert names_in(built) - source_files() == {f"{information}/{name}" for name in beside}


@pytest.mark.slow
def test_source_archive_and_tree_build_the_same_wheel(built: Path, tmp_path: Path) -> None:
    """``build`` makes the wheel from the source archive; here it is made from the tree as well."""
    source = tmp_path / "source"
    shutil.copytree(built / "source", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sums_in(tmp_path) == sums_in(built)


def test_one_version_everywhere() -> None:
    """The citation and the newest release of the changelog name the version that the code has; nothing else in the code does."""
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    }
    (cited,) = re.findall(r"^version: (.*)$", texts["CITATION.cff"], re.M)
    unreleased, newest, *_ = re.findall(r"^## \[(.*?)\]", texts["CHANGELOG.md"], re.M)
    assert (cited, newest, unreleased) == (VERSION, VERSION, "Unreleased")
    assert 'version = { attr = "mezzo.version.VERSION" }' in texts["pyproject.toml"]
    written = [path.name for path in ROOT.glob("src/**/*.py") if f'"{VERSION}"' in path.read_text(encoding="utf-8")]
    assert written == ["version.py"]
    assert mezzo.__version__ == VERSION


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_can_read_the_source(version: str) -> None:
    """Also where no such Python is there: the grammar of each is known to this one, up to its own."""
    grammar = min((3, int(version.partition(".")[2])), sys.version_info[:2])
    for path in (ROOT / "src").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=grammar)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_compiles_the_wheel(version: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [python_or_skip(version), "-W", "error", "-m", "compileall", "-q", str(tmp_path / "mezzo")]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
def test_a_new_environment_installs_and_starts(built: Path, tmp_path: Path) -> None:
    """Of the oldest Python, which needs more packages. Torch is left out: help, records and reports need none."""
    bin_folder = tmp_path / "venv" / "bin"
    subprocess.run([python_or_skip(VERSIONS[0]), "-m", "venv", "--without-pip", str(bin_folder.parent)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "--disable-pip-version-check"]
    install += ["install", "--quiet", "--no-compile"]
    apart = os.environ | {"PYTHONPATH": ""}  # else pip takes a mezzo that is on the path for installed
    subprocess.run([*install, *WITHOUT_TORCH], check=True, env=apart)
    subprocess.run([*install, "--no-deps", *map(str, built.glob("*.whl"))], check=True, env=apart)
    for words in (["--version"], ["--help"], ["report", "--help"]):
        command = [str(bin_folder / "mezzo"), *words]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=apart | {"PYTHONWARNINGS": "error"}
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
