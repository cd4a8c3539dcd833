"""Modules, imports and levels of a package are counted as a person would."""

from __future__ import annotations

from packages import inner_imports_of, levels_of, modules_of

SOURCES = {
    "package/__init__.py": "import mezzo.package.top\n",
    "package/base.py": "",
    "package/ground.py": "from mezzo.package import base\nfrom mezzo.package.base import x\n",
    "package/inner/__init__.py": "",
    "package/inner/a.py": "from mezzo.package.inner import b\nfrom mezzo.package.ground import y\n",
    "package/inner/b.py": "def f():\n    from mezzo.package import ground\n",
    "package/top.py": "from mezzo.package.inner.a import z\nif TYPE_CHECKING:\n    from mezzo.package import base\n",
    "other.py": "from mezzo.package import base\n",
}


def test_modules_are_files_and_subpackages() -> None:
    assert modules_of("package", SOURCES) == {"base", "ground", "inner", "top"}


def test_an_import_is_between_modules_of_one_package() -> None:
    assert inner_imports_of("package", SOURCES) == {("ground", "base"), ("inner", "ground"), ("top", "inner")}


def test_levels_are_the_longest_chain() -> None:
    names, imports = modules_of("package", SOURCES), inner_imports_of("package", SOURCES)
    assert levels_of(names, imports) == 4
    assert levels_of(names, imports | {("top", "base")}) == 4
    assert levels_of(names, imports | {("base", "top")}) == 4  # a circle is counted once
    assert levels_of(names, set()) == 1
