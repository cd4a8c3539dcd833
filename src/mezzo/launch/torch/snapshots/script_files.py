"""The script's own files and modules: which code is the script's, and its code after rewriting."""

from __future__ import annotations

import os
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from mezzo.children.as_python import run_changed
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.rewriting import FunctionPlace, ScriptSource, WayBack, codes_in, place_of, rewritten

_LIBRARY = Path(os.__file__).resolve().parent
"""Python's own modules."""
_OWN_PACKAGE = Path(__file__).resolve().parents[3]


class OwnFiles:
    """The files of the script that have been loaded, by path."""

    def __init__(self, folder: str, ways: list[WayBack]) -> None:
        """Begin with no file.

        Args:
            folder: the modules below it are the script's own.
            ways: of each function that a resumed run enters again.
        """
        self.folder = Path(folder).resolve()
        self._ways = ways
        self.sources: dict[str, ScriptSource] = {}
        self.modules: dict[str, ModuleType] = {}
        self._names: dict[str, str] = {}
        self._codes: dict[tuple[str, FunctionPlace], CodeType | None] = {}

    def may_be_own(self, file: Path) -> bool:
        """Return whether a module's file is one of the script's: below its folder, or below the working folder that contains it."""
        here, above = Path.cwd().resolve(), [self.folder, *self.folder.parents]
        roots = {self.folder, here} if here in above and here != Path(here.anchor) else {self.folder}
        installed = {"site-packages", "dist-packages"} & set(file.parts) or _OWN_PACKAGE in file.parents
        return not installed and _LIBRARY not in file.parents and not roots.isdisjoint(file.parents)

    def run_as_main(self, path: str, *, package: str | None = None) -> dict[str, Any]:
        """Run a file as ``__main__`` and return its global variables; ``package`` is a module's, as for ``python -m``."""

        def code_of(module: ModuleType) -> CodeType:
            self.modules["__main__"] = module
            return self.code(path)

        return run_changed(path, code_of, package=package)

    def code(self, path: str) -> CodeType:
        """Return the rewritten code of a file."""
        source = self.sources[path] = ScriptSource(path)
        # Now, because the script may leave the folder to which a path is relative.
        name = self._names[path] = os.path.relpath(os.path.realpath(path), self.folder)
        code = rewritten(source, [way for way in self._ways if way.file == name])
        for inner in codes_in(code):
            key = (path, place_of(inner))
            self._codes[key] = None if key in self._codes else inner  # two lambdas of one line cannot be told apart
        return code

    def name_of(self, path: str) -> str:
        """Return a file's name in snapshots: a script may be resumed in another folder."""
        return self._names[path]

    def path_of(self, name: str) -> str:
        """Return the path of a file by ``name_of``, as its code has it.

        Raises:
            SnapshotError: the script has not loaded such a file.
        """
        found = next((path for path in self.sources if self.name_of(path) == name), None)
        if found is None:
            raise SnapshotError(f"the script has not loaded {name}", hint="resume with the script as it was")
        return found

    def has(self, frame_or_code: FrameType | CodeType) -> bool:
        """Return whether code is the script's."""
        code = frame_or_code if isinstance(frame_or_code, CodeType) else frame_or_code.f_code
        return code.co_filename in self.sources

    def code_at(self, path: str, place: FunctionPlace) -> CodeType:
        """Return a function's code.

        Raises:
            SnapshotError: there is none, or several.
        """
        code = self._codes.get((path, place))
        if code is None:
            raise SnapshotError(
                f"{Path(path).name}:{place.line} has no function {place.name}, or several on one line",
                hint="resume with the script as it was; give each lambda a line of its own",
            )
        return code

    def is_own(self, module: str | None) -> bool:
        """Return whether a module is one of the script's."""
        return module in self.modules

    def module_of(self, variables: dict[str, Any]) -> str:
        """Return the name of the module with these global variables; empty if it is none of the script's."""
        return next((name for name, module in self.modules.items() if module.__dict__ is variables), "")

    def own_frames(self, innermost: FrameType | None) -> list[FrameType]:
        """Return the script's frames among ``frames``."""
        return [one for one in self.frames(innermost) if self.has(one)]

    def frames(self, innermost: FrameType | None) -> list[FrameType]:
        """Return the frames from the script's first one to ``innermost``, including libraries' frames."""
        found = list[FrameType]()
        while innermost is not None:
            found.append(innermost)
            innermost = innermost.f_back
        found.reverse()
        first = next((n for n, frame in enumerate(found) if self.has(frame)), len(found))
        return found[first:]


class Finder(MetaPathFinder):
    """Finds the modules beside the script, and loads them rewritten."""

    def __init__(self, files: OwnFiles) -> None:
        self._files = files

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of one of the script's modules; None for any other."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        origin = Path(spec.origin).resolve()
        if not self._files.may_be_own(origin):
            return None
        spec.loader = _Loader(fullname, str(origin), self._files)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, files: OwnFiles) -> None:
        super().__init__(name, path)
        self._files = files

    def get_code(self, fullname: str) -> CodeType:
        return self._files.code(self.path)

    def exec_module(self, module: ModuleType) -> None:
        self._files.modules[module.__name__] = module
        super().exec_module(module)
