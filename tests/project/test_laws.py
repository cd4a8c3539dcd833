"""The laws of the source tree: who imports whom, how long things are, what an error and a dtype name need.

Each law is a function from source text to its violations; the last part of the file shows that each finds a violation.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

import mezzo
from mezzo import errors
from paths import TESTS

ROOT = Path(mezzo.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree, parsed once for all laws."""
    return ast.parse(source)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return all nodes of the syntax tree."""
    return list(ast.walk(tree_of(source)))


@pytest.fixture(autouse=True, scope="module")
def _trees_are_forgotten() -> Iterator[None]:
    """A million nodes would slow down every collection of garbage after these tests."""
    yield
    for kept in (tree_of, nodes_of, _imports_of):
        kept.cache_clear()


# --- the laws as data: change them deliberately --------------------------------------------------

FACTS = (
    "errors error_texts version secrets readable temporary library_files formats devices gpus"
    " cuda_kernels oplists policyfields policy explain records"
)
MAY_IMPORT = {
    # package: the packages of mezzo that its files may import, also inside functions; a package names itself for its own files
    "errors": "",
    "lazy_names": "",
    "error_texts": "",
    "version": "",
    "secrets": "",
    "temporary": "",
    "library_files": "",
    "readable": "",
    "formats": "",
    "devices": "formats",
    "gpus": "errors devices",
    "cuda_kernels": "",
    "oplists": "errors",
    "explain": "oplists devices policyfields",
    "policyfields": "errors formats devices",
    "policy": "errors formats devices oplists policyfields explain",
    "frameworks": "children errors formats devices oplists explain policyfields policy frameworks",  # what is known of the others
    "records": "errors secrets readable lazy_names records",  # with each command's record
    "children": "children",  # below measure, whose predictions run scripts, and launch
    "engine": f"{FACTS} engine",
    "measure": f"{FACTS} children engine measure",
    "observe": f"{FACTS} frameworks engine measure observe",
    "patching": f"{FACTS} frameworks patching",  # reads and edits text: no torch
    "launch": f"{FACTS} children frameworks engine measure observe patching launch",  # composes counters and observers
    "studies": f"{FACTS} children measure launch studies",  # runs in child processes; a command says which
    "callables": f"{FACTS} measure observe launch commands",
    "report": "errors error_texts version secrets readable records report",  # with each command's page
    "notebook": "temporary records report",
    "pytest_plugin": "errors records report",  # it types a command, in a process of its own
    "compat": f"{FACTS} children frameworks engine measure observe launch callables report compat __init__",  # and nobody imports compat
    "commands": f"{FACTS} children frameworks engine measure observe patching launch studies report cli commands __init__",
    "cli": f"{FACTS} children frameworks engine measure observe patching launch studies report cli commands __init__",
    "__init__": f"{FACTS} lazy_names engine measure observe callables report notebook",  # on first use only, or in a notebook
    "__main__": "cli",
}

PINNED_EXPORTS = [
    "audit",
    "checkpoint",
    "Adafactor",
    "AdamW",
    "Choice",
    "ContractError",
    "DynamicScale",
    "MezzoError",
    "Muon",
    "NoScale",
    "NonFiniteLossError",
    "Policy",
    "PolicyError",
    "PrecisionWarning",
    "RecordError",
    "SGD",
    "ScaleFloorError",
    "ScriptError",
    "Session",
    "SessionError",
    "SnapshotError",
    "StaticScale",
    "UnsupportedFormatError",
    "compare_point",
    "diagnose",
    "expect",
    "fallback",
    "fast_path",
    "ranges",
    "read_record",
]
MAX_FILE_LINES = 600
MAX_BODY_LINES = 60
MEDIAN_BODY_LINES = 12
LONG_FILES: dict[str, str] = {}  # path: reason
LONG_BODIES: dict[str, str] = {}  # path::function: reason

DTYPE_FILES = ("formats.py", "policy.py", "oplists.py", "engine/kernels")
DTYPE_EXCEPTIONS: dict[str, str] = {}  # path: reason

LIGHT_MODULES = [f"mezzo.{name}" for name in FACTS.split()]  # and the report: none imports torch


# --- 1. the import table -------------------------------------------------------------------------

Kind = Literal["load", "call", "type"]


class Import(NamedTuple):
    """One import of a part of mezzo: its module, its line and when it happens."""

    target: str
    line: int
    kind: Kind
    """``load``: when the module is imported; ``call``: inside a function; ``type``: for type checkers only."""


def module_of(path: str) -> str:
    """Return the dotted name of the file at ``path`` under src/mezzo."""
    return ".".join(["mezzo", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).rstrip(".")


LIGHT_PARTS = {"record": "records", "page": "report", "together": "report"}
"""Files in a command's folder that belong to a package of which all may read records: they import nothing else of the command."""


def package_of(module: str) -> str:
    """Return the package of a dotted name: ``mezzo.engine.session`` lies in ``engine``, ``mezzo`` in ``__init__``."""
    _, package, *inner = [*module.split("."), "__init__"]
    return LIGHT_PARTS.get(inner[-2], package) if package == "commands" and len(inner) == 3 else package


def imports_of(source: str, path: str, modules: set[str]) -> list[Import]:
    """Return the imports of parts of mezzo in ``source``, the text of the file at ``path``."""
    return _imports_of(source, path, frozenset(modules))


@functools.cache
def _imports_of(source: str, path: str, modules: frozenset[str]) -> list[Import]:
    return list(_imports(tree_of(source), path, modules, "load"))


def _imports(node: ast.AST, path: str, modules: frozenset[str], kind: Kind) -> Iterator[Import]:
    for target in _targets(node, path, modules):
        yield Import(target, getattr(node, "lineno", 0), kind)
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        for child in node.body:
            yield from _imports(child, path, modules, "type")
        for child in node.orelse:
            yield from _imports(child, path, modules, kind)
        return
    inner: Kind = "call" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else kind
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, path, modules, inner if kind == "load" else kind)


def _targets(node: ast.AST, path: str, modules: frozenset[str]) -> list[str]:
    found: list[str] = []
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parts = module_of(path).split(".") if path.endswith("__init__.py") else module_of(path).split(".")[:-1]
        package = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*package, *([node.module] if node.module else [])])
        found = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        found = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return list(dict.fromkeys(name for name in found if name.split(".")[0] == "mezzo"))


def forbidden_imports(sources: dict[str, str]) -> list[str]:
    """Return what the table forbids: imports that happen, at import time or inside a function."""
    modules = {module_of(path) for path in sources}
    return [
        f"{path}:{found.line} imports {found.target}"
        for path, source in sources.items()
        for found in imports_of(source, path, modules)
        if found.kind != "type" and package_of(found.target) not in MAY_IMPORT[_package_of_file(path)].split()
    ]


def _package_of_file(path: str) -> str:
    return package_of(module_of(path))


def import_cycle(sources: dict[str, str]) -> list[str]:
    """Return modules that import each other in a circle, also inside a function or for types only, or an empty list."""
    modules = {module_of(path) for path in sources}
    graph = {module_of(path): [i.target for i in imports_of(source, path, modules)] for path, source in sources.items()}
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        circles = (visit(target, [*trail, module]) for target in graph.get(module, []))
        circle = next((circle for circle in circles if circle), [])
        done.add(module)
        return circle

    return next((circle for circle in (visit(module, []) for module in graph) if circle), [])


def test_every_package_has_a_row_in_the_import_table() -> None:
    assert {_package_of_file(path) for path in SOURCES} <= set(MAY_IMPORT)
    named = {package for allowed in MAY_IMPORT.values() for package in allowed.split()}
    assert named <= set(MAY_IMPORT)


def test_imports_follow_the_table() -> None:
    assert forbidden_imports(SOURCES) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_cycle(SOURCES) == []


SHORT = 150
MOST_SATELLITES = 7
"""What may stay apart: where the joined file would be long, load a library that its users do without, or import in a circle."""


def satellites(sources: dict[str, str]) -> list[str]:
    """Return short files that only one file imports, in the same folder: each is a part of that file with a header of its own."""
    modules = {module_of(path) for path in sources}
    importers: dict[str, set[str]] = {}
    for path, source in sources.items():
        for found in imports_of(source, path, modules):
            if found.target != module_of(path):
                importers.setdefault(found.target, set()).add(path)
    short = [path for path, source in sources.items() if source.count("\n") < SHORT]
    parts = [path for path in short if path.rpartition("/")[2] not in ("__init__.py", "__main__.py")]
    users = {path: importers.get(module_of(path), set()) for path in parts}
    folder = {path: path.rpartition("/")[0] for path in sources}
    return sorted(
        path for path, by in users.items() if {folder[user] for user in by} == {folder[path]} and len(by) == 1
    )


def unfilled(source: str) -> list[str]:
    """Return the lines of texts with a name in braces that are no f-strings: a person would read the name."""
    tree = tree_of(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in parts]
    return [
        f"{node.lineno}: {node.value}"
        for node in texts
        if isinstance(node.value, str) and "``" not in node.value and re.search(r"\{[a-z_]+\.[a-z_]+\}", node.value)
    ]


def test_every_name_in_braces_is_filled_in() -> None:
    assert unfilled('a = "in {state.higher}"\nb = f"in {state.higher}"\n') == ["1: in {state.higher}"]
    assert {path: lines for path, source in SOURCES.items() if (lines := unfilled(source))} == {}


def test_few_files_are_parts_of_a_neighbour() -> None:
    assert len(found := satellites(SOURCES)) <= MOST_SATELLITES, found


def defined_too_late(sources: dict[str, str]) -> list[str]:
    """Return files that begin to run as a program before all of them is defined."""
    bodies = {path: tree_of(source).body for path, source in sources.items()}
    return [
        path
        for path, body in bodies.items()
        if any("__main__" in ast.unparse(node)[:30] for node in body[:-1] if isinstance(node, ast.If))
    ]


def test_a_program_begins_at_the_end_of_its_file() -> None:
    assert defined_too_late({"a.py": 'if __name__ == "__main__":\n    main()\n\n\ndef main(): ...\n'}) == ["a.py"]
    assert defined_too_late(SOURCES) == []


SUBPACKAGES_APART = {"observe": "audit nonfinite ranges fallback lint values contracts", "launch": "torch keras paddle"}
MAY_IMPORT_SUBPACKAGES = {"launch.keras": "torch"}  # Keras trains on torch, too


def subpackages_crossed(sources: dict[str, str]) -> list[str]:
    """Return imports from one subpackage of a package into another; what two subpackages need lies in the package itself."""
    modules = {module_of(path) for path in sources}
    found = []
    for path, source in sources.items():
        package, subpackage, *_ = [*path.removesuffix(".py").split("/"), ""]
        apart = SUBPACKAGES_APART.get(package, "").split()
        allowed = [subpackage, *MAY_IMPORT_SUBPACKAGES.get(f"{package}.{subpackage}", "").split()]
        for one in imports_of(source, path, modules):
            _, target_package, target_subpackage, *_ = [*one.target.split("."), "", ""]
            if (
                subpackage in apart
                and target_package == package
                and target_subpackage in apart
                and target_subpackage not in allowed
            ):
                found.append(f"{path}:{one.line} imports {one.target}")
    return found


def test_subpackages_do_not_import_each_other() -> None:
    assert subpackages_crossed(SOURCES) == []


# --- 2. the public names -------------------------------------------------------------------------


def test_exports_are_the_pinned_ones() -> None:
    exported = list(getattr(mezzo, "__all__", []))
    assert sorted(exported) == sorted(PINNED_EXPORTS)
    assert [name for name in exported if not hasattr(mezzo, name)] == []


def test_the_names_are_found_in_an_archive(tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "mezzo"), "zip", ROOT.parent, "mezzo")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mezzo; print(mezzo.__file__, *mezzo.__all__)"
    where, *names = run_python(code, archive).stdout.split()
    assert where.startswith(archive)
    assert sorted(names) == sorted(PINNED_EXPORTS)


PINNED_ATTRIBUTES = {
    "Session": "accumulate autocast backward batches capture casting clip_norm clip_value device epoch explain grad_norm guardrails "
    "is_whole_loop load load_state_dict loss_scale masters models optimizers policy processes save scales schedulers skipped state "
    "state_dict step train_batch unscale update updates",
    "Policy": "accumulate arithmetic arithmetic_on backoff_factor bf16_products casting changes_gradients compute end_layers explain fp32 "
    "fp32_modules fp8_formats fp8_recipe gather gradient_rounding gradients growth_factor growth_interval hadamard hysteresis in_blocks "
    "in_layers init_scale load loss_scale lower lowers master_weights max_scale min_scale name norms of op_lists parse reduce reduce_order "
    "replace required_formats scale_rule storage to_toml weight_blocks widest world",
    "AdamW": "begin_masters explain has_master keep_masters master master_weights parameters replaced set_master update whole_shape",
    "SGD": "begin_masters explain has_master keep_masters master master_weights parameters replaced set_master update whole_shape",
}
"""The public attributes of the objects that a script builds, without those that torch's optimizers have."""


def test_the_public_attributes_are_the_pinned_ones() -> None:
    model = torch.nn.Linear(2, 2)
    optimizers = [mezzo.AdamW(model.parameters()), mezzo.SGD(model.parameters(), lr=0.1)]
    session = mezzo.Session(model, optimizers[0], policy="fp32")
    of_torch = set(dir(torch.optim.SGD(model.parameters(), lr=0.1)))
    built = {type(one).__name__: set(dir(one)) - of_torch for one in optimizers}
    built |= {"Session": set(dir(session)), "Policy": set(dir(session.policy))}
    public = {name: sorted(n for n in attributes if n[0] != "_") for name, attributes in built.items()}
    assert public == {name: names.split() for name, names in PINNED_ATTRIBUTES.items()}


# --- 3. sizes ------------------------------------------------------------------------------------


def body_lines(source: str) -> list[tuple[str, int]]:
    """Return the name of each function with the lines of its body, its docstring not counted."""
    sizes = []
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            size = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            sizes.append((node.name, size))
    return sizes


def long_files(sources: dict[str, str]) -> dict[str, int]:
    sizes = {path: len(source.splitlines()) for path, source in sources.items()}
    return {path: size for path, size in sizes.items() if size > MAX_FILE_LINES}


def long_bodies(sources: dict[str, str]) -> dict[str, int]:
    sizes = [(f"{path}::{name}", n) for path, source in sources.items() for name, n in body_lines(source)]
    return {place: n for place, n in sizes if n > MAX_BODY_LINES}


def test_long_files_are_the_listed_ones() -> None:
    assert set(long_files(SOURCES)) == set(LONG_FILES), long_files(SOURCES)


def test_long_bodies_are_the_listed_ones() -> None:
    assert set(long_bodies(SOURCES)) == set(LONG_BODIES), long_bodies(SOURCES)


def test_the_median_body_is_short() -> None:
    sizes = [size for source in SOURCES.values() for _, size in body_lines(source)]
    assert statistics.median(sizes) < MEDIAN_BODY_LINES


# --- 4. errors -----------------------------------------------------------------------------------

ERROR_NAMES = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.MezzoError)
}


def errors_without_hint(source: str) -> list[int]:
    """Return the lines that make one of Mezzo's errors without a hint, or raise the bare class."""
    lines = []
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and _last_name(node.func) in ERROR_NAMES:
            hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            if not hints or ast.unparse(hints[0]) in ("''", "None"):
                lines.append(node.lineno)
        if isinstance(node, ast.Raise) and node.exc is not None and _last_name(node.exc) in ERROR_NAMES:
            lines.append(node.lineno)
    return lines


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def errors_defined(source: str) -> list[str]:
    """Return the classes that derive from one of Mezzo's errors."""
    classes = [node for node in nodes_of(source) if isinstance(node, ast.ClassDef)]
    return [cls.name for cls in classes if any(_last_name(base) in ERROR_NAMES for base in cls.bases)]


def test_every_error_is_raised_with_a_hint() -> None:
    assert {path: found for path, source in SOURCES.items() if (found := errors_without_hint(source))} == {}


def test_errors_are_defined_in_one_file() -> None:
    assert [path for path, source in SOURCES.items() if errors_defined(source)] == ["errors.py"]


# --- 7. dtype names ------------------------------------------------------------------------------

DTYPE_NAME = re.compile(r"(torch\.)?(b?float16|half|float8_\w+)")


def dtype_names(source: str) -> list[str]:
    """Return the 16-bit and 8-bit dtype names in ``source``: as strings, of torch, or as a tensor's casting methods."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DTYPE_NAME.fullmatch(node.value):
            found.append(f"{node.lineno}: {node.value!r}")
        if isinstance(node, ast.Attribute) and DTYPE_NAME.fullmatch(node.attr) and _last_name(node.value) == "torch":
            found.append(f"{node.lineno}: torch.{node.attr}")
        if isinstance(node, ast.Call) and not node.args and re.search(r"\.(half|bfloat16)$", ast.unparse(node.func)):
            found.append(f"{node.lineno}: .{_last_name(node.func)}()")
    return found


def test_dtype_names_stay_in_their_files() -> None:
    elsewhere = {path: dtype_names(source) for path, source in SOURCES.items() if not path.startswith(DTYPE_FILES)}
    found = {path: names for path, names in elsewhere.items() if names}
    assert set(found) == set(DTYPE_EXCEPTIONS), found


# --- 8a. a framework's name stands in its own folders alone ---

OTHER_FRAMEWORK = re.compile(r"keras|tensorflow|paddle|(?<![a-z])jax", re.IGNORECASE)
FRAMEWORK_FOLDERS = ("frameworks/", "launch/keras/", "launch/paddle/", "patching/keras.py", "patching/paddle.py")
FRAMEWORKS_NAMED = {
    # path: why a framework is named outside its own folders
    "launch/ranks/launched.py": "variables of a launcher, which are read before any framework is known",
    "launch/ranks/leading.py": "the same variables",
    "launch/targets.py": "a launcher's module, as it is typed",
    "report/commands.py": "variables and words of a launcher in a command that is repeated",
    "measure/environment.py": "names of environment variables that a record keeps",
    "launch/recording.py": "a library that opens files in native code, in scripts of any framework",
    "launch/spawned.py": "packages whose processes do not train, in scripts of any framework",
    "observe/source_lines.py": "folders of libraries on the stack of a PyTorch operation",
    "observe/tracer.py": "the same",
    "observe/audit/observer.py": "a library on PyTorch, whose layers an audit names",
    "observe/audit/causes.py": "what to write in that library",
    "patching/make.py": "which of the styles a script is patched in",
    "patching/text.py": "names of these styles",
    "patching/reading.py": "what the calls of each library do",
    "policy.py": "the names of presets in other libraries",
    "records/run.py": "the libraries in the records of this version",
    "commands/check/patches.py": "a patch of the library's own mixed precision",
    "commands/diagnose/fixes.py": "what a library cannot do",
    "commands/diagnose/words.py": "what a library cannot do",
    "commands/fallback/find.py": "what a library cannot do",
    "commands/tune/command.py": "what is not predicted of a library",
}


def frameworks_named(source: str) -> list[str]:
    """Return the names of frameworks beside PyTorch in code: in identifiers, imports, and strings that document nothing."""
    found = []
    documented = {id(node.value) for node in nodes_of(source) if isinstance(node, ast.Expr)}
    for node in nodes_of(source):
        texts = [
            str(value)
            for name, value in ast.iter_fields(node)
            if name in ("id", "attr", "arg", "name", "asname", "module")
        ]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            texts.append(node.value)
        found += [text for text in texts if OTHER_FRAMEWORK.search(text)]
    return found


def test_a_framework_is_named_in_its_own_folders() -> None:
    snippet = '"""Not keras."""\nimport jax\nas_paddle = 1\nx.keras = "tensorflow"\n'
    assert frameworks_named(snippet) == ["jax", "as_paddle", "keras", "tensorflow"]
    outside = {path: source for path, source in SOURCES.items() if not path.startswith(FRAMEWORK_FOLDERS)}
    found = {path: names for path, source in outside.items() if (names := frameworks_named(source))}
    assert set(found) == set(FRAMEWORKS_NAMED), found


# --- 8b. no file reaches into an object of another file ---

REACH = re.compile(r"mezzo/(\S+?):\d+: error: mezzo\.(\S+)  \[reach\]")
REACHED: dict[str, int] = {
    # class: how often another file sets one of its attributes or reads a private one
    "compat.apex.amp.state.AmpState": 1,
    "compat.apex.amp.state.CastsOfO1": 1,
    "compat.driven.Driven": 2,
    "engine.scaling.DynamicScale": 1,
    "engine.scaling.NoScale": 1,
    "launch.keras.state.KerasRun": 2,
    "launch.paddle.state.HostScale": 1,
    "launch.paddle.state.PaddleRun": 1,
    "launch.torch.phase.Phase": 5,
    "launch.torch.open_update.OpenUpdate": 8,
    "measure.plain_steps.PlainSteps": 1,
    "measure.predict.tape.TrainingTape": 1,
    "measure.steps.StepClock": 1,
    "observe.observer.Observer": 1,
}


def reaches(folder: Path, packages: Path) -> list[tuple[str, str]]:
    """Return each file below ``packages`` that reaches into an object of another file, with the attribute (``reaches.py``).

    Args:
        folder: for the settings and the cache of mypy.
        packages: where the package ``mezzo`` lies.
    """
    pytest.importorskip("mypy")
    project = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    overrides = project[project.index("[[tool.mypy.overrides]]") : project.index("[tool.pytest")]
    plugin = TESTS / "project" / "reaches.py"
    (folder / "pyproject.toml").write_text(
        f"[tool.mypy]\nplugins = ['{plugin}']\npackages = ['mezzo']\nmypy_path = '{packages}'\n{overrides}",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode < 2, done.stdout + done.stderr
    return REACH.findall(done.stdout)


def test_no_file_reaches_into_an_object_of_another(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    found = reaches(tmp_path if cache is None else cache.mkdir("reaches"), ROOT.parent)
    assert Counter(name.rpartition(".")[0] for _, name in found) == REACHED


SMALL_PACKAGE = {
    "a.py": """
from typing import NamedTuple

class A:
    x = 1
    def __init__(self) -> None:
        self.y, self._z = 1, 2
    def _run(self) -> None:
        self.y = 2

class B(NamedTuple):
    n: int

def same_file(a: A) -> None:
    a.x = a._z
""",
    "b.py": """
import threading
from mezzo.a import A, B

class C(A):
    def grow(self) -> None:
        self.y += self._z
        super()._run()

class Holder:
    def __init__(self, a: A) -> None:
        self.a = a

def others(a: A, b: B, holder: Holder, thread: threading.Thread) -> None:
    print(a.x, b._replace(n=2), holder.a.y)
    thread.name = "t"

def sets(a: A) -> None:
    a.x = 3

def sets_under_another_name(holder: Holder) -> None:
    c = holder.a
    c.y += 1
    setattr(c, "y", 1)
    c.__dict__["y"] = 1

def reads(self: A) -> None:
    self._run()
    print(self._z)
""",
}


def test_a_file_that_reaches_into_an_object_of_another_is_found(tmp_path: Path) -> None:
    (tmp_path / "mezzo").mkdir()
    for name, source in {"__init__.py": "", **SMALL_PACKAGE}.items():
        (tmp_path / "mezzo" / name).write_text(source, encoding="utf-8")
    reached = ["x", "y", "setattr", "__dict__", "_run", "_z"]
    assert reaches(tmp_path, tmp_path) == [("b.py", f"a.A.{name}") for name in reached]


OF_APEX = "_amp_state"
"""A name that scripts import from Apex."""


def private_names_taken(sources: dict[str, str]) -> list[str]:
    """Return the private names that a file takes from a module of Mezzo."""
    found = []
    for path, source in sources.items():
        imports = [n for n in nodes_of(source) if isinstance(n, ast.ImportFrom) and str(n.module).startswith("mezzo")]
        names = [alias for node in imports for alias in node.names]
        known = {alias.asname or alias.name for alias in names}
        read = (n for n in nodes_of(source) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
        taken = [alias.name for alias in names] + [n.attr for n in read if n.value.id in known and n.value.id.islower()]
        found += [f"{path}: {name}" for name in taken if re.match(r"_[a-z]", name, re.IGNORECASE) and name != OF_APEX]
    return found


def test_no_file_takes_a_private_name_of_a_module() -> None:
    small = {"a.py": "from mezzo.engine import _x, checks\nchecks._y()\n", "b.py": "import torch\ntorch._z\nself._x\n"}
    assert private_names_taken(small) == ["a.py: _x", "a.py: _y"]
    assert private_names_taken(SOURCES) == []


# --- 8c. facts are data: no sentence decides anything ---

_SENTENCES = frozenset(
    (
        "what",
        "reason",
        "why",
        "hint",
        "advice",
        "headline",
        "title",
        "detail",
        "details",
        "fix",
        "fix_line",
        "fix_where",
    )
)
"""Fields of records and errors that are read by people."""
_TEXT_METHODS = frozenset(
    (
        "startswith",
        "endswith",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "split",
        "find",
        "index",
        "count",
    )
)
_PATTERNS = frozenset(("compile", "match", "search", "fullmatch", "sub", "split", "findall", "finditer"))
SENTENCES_READ = {
    # path: the texts of others that it reads, or why its own are no sentences
    "error_texts.py": "errors of torch, CUDA and Python",
    "cli/usage.py": "errors of click and pydantic, and the command that was typed",
    "launch/recording.py": "Python's tracebacks",
    "launch/ranks/blame.py": "faulthandler's tracebacks",
    "children/guard.py": "the kernel's /proc/PID/status",
    "notebook.py": "Python's NameError in the output of a cell",
    "measure/predict/script/tapes.py": "errors of Python and the output of the process that traced",
    "devices.py": "names of GPUs",
    "measure/environment.py": "names of environment variables, as a verbose pattern",
    "report/html.py": "texts that must not be broken between lines, as a pattern",
    "launch/torch/snapshots/functions.py": "kinds of parts in a snapshot's file",
    "launch/torch/snapshots/loops.py": "kinds of parts in a snapshot's file",
    "launch/torch/snapshots/walk.py": "kinds of parts in a snapshot's file",
    "cli/shown_help.py": "the default in an option's help",
    "cli/progress.py": "its own time, without the seconds",
    "commands/check/page.py": "the order of a page's lines",
}


def _members(sources: dict[str, str]) -> set[str]:
    """Return the members of all Literal types."""
    types = (
        node.slice
        for source in sources.values()
        for node in nodes_of(source)
        if isinstance(node, ast.Subscript) and _last_name(node.value) == "Literal"
    )
    return {
        c.value for kind in types for c in ast.walk(kind) if isinstance(c, ast.Constant) and isinstance(c.value, str)
    }


def _reads_as_sentence(node: ast.AST, members: set[str]) -> bool:
    """Return whether a literal, or one of several in a tuple, has two words or ends with a colon, and is no member of a type."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_reads_as_sentence(element, members) for element in node.elts)
    if isinstance(node, ast.JoinedStr):
        return any(_reads_as_sentence(part, members) for part in node.values)
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node.value in members:
        return False
    return re.search(r"\w[,;:]? [\w=]|[a-z]: ?$", node.value) is not None


def _literals(source: str) -> dict[str, ast.expr]:
    """Return the constants of a file by name."""
    assigned = [node for node in tree_of(source).body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def sentences_that_decide(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return where a text for people is parsed, matched or compared, by file.

    Found are: a field of ``_SENTENCES`` in a comparison with a literal or a constant, or read by a text method; a literal of several
    words in a comparison, a text method or a pattern, by name too for the last two, unless it is a member of a Literal type.
    """
    members, found = _members(sources), dict[str, list[str]]()
    for path, source in sources.items():
        constants = _literals(source)

        def is_read(node: ast.AST, constants: dict[str, ast.expr] = constants) -> bool:
            return _reads_as_sentence(constants.get(node.id, node) if isinstance(node, ast.Name) else node, members)

        for node in nodes_of(source):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                fixed = any((isinstance(side, ast.Constant) and side.value) or _is_constant(side) for side in sides)
                reads = any(_reads_as_sentence(side, members) for side in sides)
                reads |= fixed and any(map(_is_for_people, sides))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, of = node.func.attr, node.func.value
                reads = (name in _TEXT_METHODS or (_last_name(of) == "re" and name in _PATTERNS)) and any(
                    map(is_read, node.args)
                )
                reads |= name in _TEXT_METHODS - {"split", "partition", "count", "index"} and _is_for_people(of)
            else:
                continue
            if reads:
                found.setdefault(path, []).append(f"{node.lineno}: {ast.unparse(node)[:90]}")
    return found


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and _last_name(node).strip("_").isupper()


def _is_for_people(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _SENTENCES


def test_no_sentence_decides_anything() -> None:
    found = sentences_that_decide(SOURCES)
    assert {path: lines for path, lines in found.items() if path not in SENTENCES_READ} == {}
    assert set(SENTENCES_READ) - set(found) == set(), "these read no sentence any more"


def test_a_sentence_that_decides_is_found() -> None:
    sources = {
        "types.py": 'Role = Literal["scale of 1", "fix"]\n',
        "reads.py": """
_WRITTEN = re.compile(r'policy = "([^"]*)"')
NOTED = "CUDA graph"
_LIMIT = "stopped at its limit"
known = any(note.what == "cause" for note in notes) or any(note.what == NOTED for note in notes)
late = error.startswith(_LIMIT) or reason.value == "do not follow" or "binary cross entropy" in refusal.reason
to_try = text.removeprefix("to try:")
""",
        "reads_none.py": 'known = run.role == "scale of 1" or alarm.kind == KIND or f"{run.reason}: no" if run.reason else ""\n',
    }
    lines = {path: [line.partition(":")[0] for line in found] for path, found in sentences_that_decide(sources).items()}
    assert {path: sorted(found) for path, found in lines.items()} == {"reads.py": ["2", "5", "5", "6", "6", "6", "7"]}


# --- 9. one definition of each constant, and tests that mirror the source ---


def constants_defined_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return public constants that several files give the same literal value."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, source in sources.items():
        for name, value in _assigned(source):
            if name.strip("_").isupper() and isinstance(value, (ast.Constant, ast.Tuple)):
                found.setdefault((name.strip("_"), ast.unparse(value)), []).append(path)
    return {f"{name} = {value}": paths for (name, value), paths in found.items() if len(paths) > 1}


def _assigned(source: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns, types included, with their values."""
    for node in tree_of(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        yield from ((target.id, value) for target in targets if isinstance(target, ast.Name) and value is not None)


SAME_FOR_EACH_FRAMEWORK = ("launch/torch/", "launch/keras/", "launch/paddle/", "observe/")
SAME_FOR_EACH_TRACKER = "report/tracking/"
SAME_EVERYWHERE = {
    "FRAMEWORK": "the description of each framework",
    "HELP": "what the parser reads of each command",
    "KINDS": "the kinds of objects that a file of a snapshot restores",
}


def names_with_two_meanings(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return public classes, types and constants of one name, unless all are defined alike.

    Classes may do the same for several frameworks (``observe/`` for PyTorch), and any name for several trackers.
    """
    found: dict[str, dict[str, str]] = {}
    for path, source in sources.items():
        classes = [node.name for node in tree_of(source).body if isinstance(node, ast.ClassDef)]
        defined = dict.fromkeys(classes, f"class of {path}") | {
            name: ast.unparse(value) for name, value in _assigned(source)
        }
        for name, meaning in defined.items():
            if len(name) > 1 and not name.startswith("_") and name not in SAME_EVERYWHERE:
                found.setdefault(name, {})[path] = meaning

    def parallel(paths: Iterable[str]) -> bool:
        packages = [next((p for p in SAME_FOR_EACH_FRAMEWORK if path.startswith(p)), "") for path in paths]
        trackers = all(path.startswith(SAME_FOR_EACH_TRACKER) for path in paths)
        return trackers or ("" not in packages and len(set(packages)) == len(packages))

    return {
        name: sorted(meanings)
        for name, meanings in found.items()
        if len(set(meanings.values())) > 1 and not parallel(meanings)
    }


OTHER_TESTS = ("project", "frameworks", "cuda_build", "gpu/", "oracles", "scripts", "faults")
"""Folders under tests/ beside those of the source: the project as a whole, other environments and devices, and what tests run."""


def strangers(tests: list[str], sources: dict[str, str]) -> list[str]:
    """Return test files that lie in no folder of the source, or are named after none of its files."""
    found = []
    for test in tests:
        *folders, name = test.removesuffix(".py").split("/")
        stem = name.removeprefix("test_")
        here = [path for path in sources if path.split("/")[: len(folders)] == folders]
        names = {path.split("/")[len(folders)].removesuffix(".py") for path in here} | set(folders[-1:])
        if not any(stem.startswith(known.strip("_")) or known.startswith(stem) for known in names):
            found.append(test)
    return found


def test_no_constant_is_defined_twice() -> None:
    assert constants_defined_twice(SOURCES) == {}


def test_no_name_has_two_meanings() -> None:
    assert names_with_two_meanings(SOURCES) == {}


def test_the_tests_mirror_the_source() -> None:
    tests = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    assert strangers([test for test in tests if not test.startswith(OTHER_TESTS)], SOURCES) == []


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports test files by their names, whatever their folders."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def unknown_tests(script: str, tests: dict[str, str]) -> list[str]:
    """Return the test files, and the tests in them, that a shell script names and that are not among ``tests``."""
    named = re.findall(r"\btests/([\w/]+\.py)(?:::(\w+))?", script)
    return [
        f"{path}::{name}" if name else path
        for path, name in named
        if path not in tests or (name and f"def {name}(" not in tests[path])
    ]


def test_scripts_name_tests_that_exist() -> None:
    root = TESTS.parent
    scripts = [path for path in [root / "Makefile", *(root / ".ci").glob("*")] if path.is_file()]
    tests = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    assert {path.name: unknown_tests(path.read_text(encoding="utf-8"), tests) for path in scripts} == {
        path.name: [] for path in scripts
    }


# --- 10. nothing is written twice ----------------------------------------------------------------

MAX_SAME_LINES = 5
"""Longest run of lines that may stand in two places; import statements, comments and lines without a word do not count."""


def lines_written_twice(sources: dict[str, str]) -> list[str]:
    """Return where each longer run of lines that stands in two places begins, in both."""
    first_at: dict[tuple[str, ...], tuple[str, int]] = {}
    found, continued = [], set[tuple[tuple[str, int], tuple[str, int]]]()
    for path, source in sources.items():
        lines = _counted_lines(source)
        for at in range(len(lines) - MAX_SAME_LINES):
            run = lines[at : at + MAX_SAME_LINES + 1]
            here = path, at
            before = first_at.setdefault(tuple(text for _, text in run), here)
            if before == here:
                continue
            continued.add(((before[0], before[1] + 1), (path, at + 1)))
            if (before, here) not in continued:
                other = _counted_lines(sources[before[0]])
                found.append(f"{before[0]}:{other[before[1]][0]} = {path}:{run[0][0]}")
    return found


def _counted_lines(source: str) -> list[tuple[int, str]]:
    imports = {
        line
        for node in nodes_of(source)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    texts = ((number, " ".join(line.split())) for number, line in enumerate(source.splitlines(), 1))
    return [(n, text) for n, text in texts if n not in imports and re.search(r"\w", text) and not text.startswith("#")]


def test_no_run_of_lines_is_written_twice() -> None:
    assert lines_written_twice(SOURCES) == []


# --- 8. torch is imported late -------------------------------------------------------------------

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
RUN_HELP = """
import runpy, sys
sys.argv = ["mezzo", "--help"]
try:
    {call}
except SystemExit as stop:
    if stop.code:
        raise
for name in ("torch", "pydantic"):
    if name in sys.modules:
        sys.exit(f"mezzo --help imports {{name}}")
"""


def run_python(code: str, *args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``code``, which imports from ``folder`` first."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_light_modules_do_not_import_torch() -> None:
    views = [module_of(path) for path in SOURCES if _package_of_file(path) in ("report", "records")]
    done = run_python(IMPORT_EACH, "mezzo", "mezzo.patching", *LIGHT_MODULES, *views)
    assert done.returncode == 0, done.stderr


ENTRY_POINTS = {
    "cli/__init__.py": "from mezzo.cli import main; main()",
    "__main__.py": "runpy.run_module('mezzo', run_name='__main__')",
}


@pytest.mark.parametrize(("path", "call"), ENTRY_POINTS.items())
def test_help_imports_neither_torch_nor_pydantic(path: str, call: str) -> None:
    if not re.search(r"\bmain\b", SOURCES.get(path, "")):
        pytest.skip(f"mezzo/{path} has no main yet")
    done = run_python(RUN_HELP.format(call=call))
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


# --- every law finds a violation -----------------------------------------------------------------

TYPE_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import mezzo.{0}\nelse:\n  pass\n"
TREES: list[tuple[dict[str, str], list[str], list[str]]] = [
    # sources, forbidden imports, cycle
    ({"records.py": "from mezzo import errors\n", "errors.py": ""}, [], []),
    ({"records.py": "import mezzo.policy\n"}, ["records.py:1 imports mezzo.policy"], []),
    ({"records.py": "from mezzo.policy import Policy\n"}, ["records.py:1 imports mezzo.policy"], []),
    (
        {"records.py": "def f():\n  from mezzo import policy\n", "policy.py": ""},
        ["records.py:2 imports mezzo.policy"],
        [],
    ),
    ({"records.py": TYPE_ONLY.format("policy"), "policy.py": ""}, [], []),
    ({"records.py": "if 1:\n  from . import policy\n", "policy.py": ""}, ["records.py:2 imports mezzo.policy"], []),
    ({"report/a.py": "from ..engine import b\n", "engine/b.py": ""}, ["report/a.py:1 imports mezzo.engine.b"], []),
    ({"report/a.py": "from .b import x\n", "report/b.py": ""}, [], []),
    ({"report/__init__.py": "from .b import x\n", "report/b.py": ""}, [], []),
    ({"engine/a.py": "from mezzo import __version__\n"}, ["engine/a.py:1 imports mezzo"], []),
    (
        {"engine/a.py": "import importlib\nimportlib.import_module('mezzo.commands.run.command')\n"},
        ["engine/a.py:2 imports mezzo.commands.run.command"],
        [],
    ),
    (
        {"engine/a.py": "from mezzo.engine import b\n", "engine/b.py": "import mezzo.engine.a\n"},
        [],
        ["mezzo.engine.a", "mezzo.engine.b", "mezzo.engine.a"],
    ),
    (
        {
            "engine/a.py": "from mezzo.engine.b import x\n",
            "engine/b.py": "class B:\n  from mezzo.engine.c import x\n",
            "engine/c.py": "try:\n  from mezzo.engine import b\nexcept ImportError:\n  pass\n",
        },
        [],
        ["mezzo.engine.b", "mezzo.engine.c", "mezzo.engine.b"],
    ),
    (
        {"engine/a.py": "from mezzo.engine import b\n", "engine/b.py": "def f():\n  import mezzo.engine.a\n"},
        [],
        ["mezzo.engine.a", "mezzo.engine.b", "mezzo.engine.a"],
    ),
    (
        {"engine/a.py": "from mezzo.engine import b\n", "engine/b.py": TYPE_ONLY.format("engine.a")},
        [],
        ["mezzo.engine.a", "mezzo.engine.b", "mezzo.engine.a"],
    ),
    ({"engine/a.py": "import torch\nimport mezzoforte\n"}, [], []),
]


@pytest.mark.parametrize(("sources", "forbidden", "cycle"), TREES)
def test_import_laws_on_small_trees(sources: dict[str, str], forbidden: list[str], cycle: list[str]) -> None:
    assert forbidden_imports(sources) == forbidden
    assert import_cycle(sources) == cycle


SNIPPETS: list[tuple[Callable[[str], object], str, object]] = [
    (body_lines, "def f():\n  '''Doc.\n\n  More.\n  '''\n", [("f", 0)]),
    (body_lines, "def f():\n  '''Doc.'''\n  x = 1\n\n  # why\n  return x\n", [("f", 4)]),
    (body_lines, "class A:\n  async def f(self):\n    def g():\n      return 1\n    return g\n", [("f", 3), ("g", 1)]),
    (errors_without_hint, "raise PolicyError('x', hint='y')\nraise ValueError('x')\nraise\n", []),
    (errors_without_hint, "raise PolicyError('x')\n", [1]),
    (errors_without_hint, "e = errors.RecordError('x', hint='')\n", [1]),
    (errors_without_hint, "\nraise SessionError\n", [2]),
    (errors_without_hint, "raise make(PolicyError)\n", []),
    (errors_defined, "class A(PolicyError): ...\nclass B(ValueError): ...\n", ["A"]),
    (dtype_names, "'''torch.float16 is narrow.'''\nx.float()\ntorch.float32\nfoo.float16\n", []),
    (dtype_names, "x = 'bfloat16'\n", ["1: 'bfloat16'"]),
    (dtype_names, "x = 'torch.float8_e5m2'\n", ["1: 'torch.float8_e5m2'"]),
    (dtype_names, "x.to(torch.half)\n", ["1: torch.half"]),
    (dtype_names, "x.to(torch.float8_e4m3fn)\n", ["1: torch.float8_e4m3fn"]),
    (dtype_names, "model.half()\n", ["1: .half()"]),
]


@pytest.mark.parametrize(("law", "source", "found"), SNIPPETS)
def test_laws_on_small_sources(law: Callable[[str], object], source: str, found: object) -> None:
    assert law(source) == found


def test_a_subpackage_that_imports_another_is_found() -> None:
    sources = {
        "observe/lint/a.py": "from mezzo.observe.audit import b\nfrom mezzo.observe import c\n",
        "observe/c.py": "",
    }
    sources |= {"observe/audit/b.py": "from mezzo.observe.audit import d\n", "observe/audit/d.py": ""}
    assert subpackages_crossed(sources) == ["observe/lint/a.py:1 imports mezzo.observe.audit.b"]
    keras = {
        "launch/keras/a.py": "from mezzo.launch.torch import b\n",
        "launch/torch/b.py": "import mezzo.launch.keras.a\n",
    }
    assert subpackages_crossed(keras) == ["launch/torch/b.py:1 imports mezzo.launch.keras.a"]


def test_a_constant_defined_twice_is_found() -> None:
    assert constants_defined_twice({"a.py": "AS_IS = 'as-is'\n", "b.py": "_AS_IS = 'as-is'\n"}) == {
        "AS_IS = 'as-is'": ["a.py", "b.py"]
    }
    assert constants_defined_twice({"a.py": "LIMIT = 1\nOTHER = 2\n", "b.py": "LIMIT = 2\nx = 1\n"}) == {}


def test_lines_written_twice_are_found() -> None:
    body = "".join(f"x{n} = f({n})\n" for n in range(6))
    assert lines_written_twice({"a.py": f"import os\n{body}", "b.py": f"y = 1\n\n# why\n{body}z = 1\n"}) == [
        "a.py:2 = b.py:4"
    ]
    assert lines_written_twice({"a.py": f"{body}x6 = 1\n", "b.py": f"{body}x6 = 1\n"}) == ["a.py:1 = b.py:1"]
    assert lines_written_twice({"a.py": f"{body}y = 1\n{body}"}) == ["a.py:1 = a.py:8"]
    five = body.partition("\n")[2]
    imported = "from a import (\n" + "".join(f"    b{n},\n" for n in range(8)) + ")\n"
    assert lines_written_twice({"a.py": f"{imported}y = 1\n{five}", "b.py": f"{imported}{five}"}) == []


def test_a_name_with_two_meanings_is_found() -> None:
    def named_twice(*paths: str) -> bool:
        return names_with_two_meanings(dict.fromkeys(paths, "class Run:\n    pass\n")) == {"Run": sorted(paths)}

    assert named_twice("cli/a.py", "records/a.py")
    assert named_twice("observe/a.py", "observe/b.py")
    assert named_twice("observe/a.py", "records/a.py")
    assert named_twice("report/tracking/a.py", "report/a.py")
    assert not named_twice("launch/torch/a.py", "launch/keras/a.py", "observe/a.py")
    assert not named_twice("report/tracking/wandb.py", "report/tracking/mlflow.py")
    types = {"a.py": "State = Literal['a']\n", "b.py": "class State:\n    pass\n", "c.py": "State: TypeAlias = int\n"}
    assert names_with_two_meanings(types) == {"State": ["a.py", "b.py", "c.py"]}
    assert names_with_two_meanings({"a.py": "KEPT_S = 1.0\n", "b.py": "KEPT_S = 2.0\n"}) == {"KEPT_S": ["a.py", "b.py"]}
    assert names_with_two_meanings({"a.py": "Any2 = Callable[..., Any]\n", "b.py": "Any2 = Callable[..., Any]\n"}) == {}


def test_a_part_of_a_neighbour_is_found() -> None:
    sources = {
        "engine/session.py": "from mezzo.engine import window\nfrom mezzo.engine.scaling import Scale\n",
        "engine/window.py": "",
        "engine/scaling.py": "\n" * SHORT,
        "engine/state.py": "from mezzo.engine import casts\n",
        "engine/casts.py": "",
        "report/text.py": "def show():\n    from mezzo.engine.casts import cast\n",
    }
    assert satellites(sources) == ["engine/window.py"]


def test_a_test_that_mirrors_nothing_is_found() -> None:
    sources = {"engine/session.py": "", "engine/kernels/gpu.py": "", "policy.py": ""}
    mirrored = [
        "engine/test_session_budget.py",
        "engine/kernels/test_gpu.py",
        "engine/test_kernels.py",
        "test_policy.py",
    ]
    assert strangers([*mirrored, "engine/test_loops.py", "motor/test_session.py"], sources) == [
        "engine/test_loops.py",
        "motor/test_session.py",
    ]


def test_a_test_that_a_script_names_and_that_does_not_exist_is_found() -> None:
    tests = {"engine/test_session.py": "def test_a_step() -> None:\n    ...\n"}
    script = "pytest tests/engine/test_session.py::test_a_step tests/engine/test_session.py::test_a tests/test_gone.py"
    assert unknown_tests(script, tests) == ["engine/test_session.py::test_a", "test_gone.py"]


def test_sizes_beyond_the_limits_are_found() -> None:
    line = "  x = 1\n"
    assert long_files({"a.py": "\n" * 600, "b.py": "\n" * 601}) == {"b.py": 601}
    assert long_bodies({"a.py": f"def f():\n{line * 60}", "b.py": f"def g():\n{line * 61}"}) == {"b.py::g": 61}


@pytest.mark.parametrize(
    ("code", "message"),
    [(IMPORT_EACH, "torch imports torch\n"), (RUN_HELP.format(call="import torch"), "mezzo --help imports torch\n")],
)
def test_an_import_of_torch_is_found(code: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # its name is enough
    done = run_python(code, "torch", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == message
