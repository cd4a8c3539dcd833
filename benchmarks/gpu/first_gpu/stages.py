"""The stages in order of worth: what runs on a GPU, and the tiny cases that test the machinery on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from benchmarks.gpu.contest.cases import plan
from benchmarks.gpu.first_gpu.running import BUDGET_S, Case, Stage

_ATTRIBUTION, _CAPTURES, _FP8 = (f"tests/gpu/test_gpu_{name}.py" for name in ("attribution", "captures", "fp8"))
FAILURES = {
    "tensor-cores": f"{_ATTRIBUTION}::test_kernels_of_tensor_cores_are_told_by_their_names",
    "reduce-overhead": f"{_CAPTURES}::test_what_cannot_be_captured_says_what_to_do[cuda-reduce-overhead]",
    "fp8-audit": f"{_FP8}::test_an_audit_counts_fp8_products",
}
"""What failed on an H100 on 2026-11-23: nine tests, seven of them the first's cases (docs/h100.md, "Tests that failed")."""
TEST_FILES = (
    _CAPTURES,
    "tests/gpu/test_gpu_profilers.py",
    _FP8,
    _ATTRIBUTION,
    "tests/gpu/test_gpu_reads.py",
    "tests/gpu/test_gpu_runs.py",
    "tests/engine/test_captured_step.py",
    "tests/gpu/test_gpu_values.py",
    "tests/engine/matrix_units/test_native_units_fp8.py",
    "tests/observe/ranges/test_ranges_casts.py",
    "tests/engine/kernels/test_kernels_low_memory.py",
)
"""All files with tests that need a GPU; those whose subjects changed most since the H100 come first."""
ZOOS = ("timm", "transformers")
_RIVALS = ("captured", "compiled")


def _tests(name: str, *chosen: str, marked: str = "gpu") -> Case:
    command = ("python", "-m", "benchmarks.gpu.first_gpu.pytest_results", "{tests}", "-m", marked, *chosen)
    return Case(name, command, modules=("pytest",), resumes=True)


def _benchmark(name: str, *words: str) -> tuple[str, ...]:
    return ("python", "-m", "benchmarks", name, *words)


def _contest(name: str, only: str, limit_s: float, *options: str) -> Case:
    words = ("--only", only, "--minutes", f"{limit_s / 60:g}", "--out", "{out}", *options)
    return Case(name, _benchmark("contest", *words), limit_s)


def _zoo(cases: str, *options: str) -> Case:
    words = ("--cases", cases, "--minutes", "1e6", "--out", "{out}/zoo.csv", *options)
    return Case(cases, _benchmark("measure_zoo", *words), modules=ZOOS, resumes=True)


def _kernels(*options: str) -> Case:
    words = ("--seconds", "1e9", "--out", "{out}", *options)
    return Case("steps", _benchmark("measure_kernels", *words), modules=ZOOS, resumes=True)


def _operations(*options: str) -> Case:
    command = _benchmark("host_by_operation", "--out", "{out}/operations.csv", *options)
    return Case("operations", command, 120, resumes=True)


def _host(model: str, seconds: float, *modules: str) -> Case:
    words = ("--device", "cuda", "--model", model, "--seconds", f"{seconds:g}", "--out", "{out}")
    return Case(f"run-{model}", _benchmark("host_time", *words), 2 * seconds, modules=modules)


def _checks(what: str, device: str, limit_s: float) -> Case:
    return Case(what, _benchmark("gpu_checks", what, device), limit_s)


def _rivals() -> Iterable[Case]:
    for case in plan(tiny=False):
        if case.name.split()[0] in _RIVALS:
            yield _contest(case.name.replace(" ", "-"), f"^{case.name}$", min(BUDGET_S, 60 + 2 * case.seconds))


def _sanitized(case: Case) -> Case:
    command = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *case.command)
    return replace(case, name="sanitizer", command=command, program=command[0])


STAGES = (
    Stage(
        "failures",
        "the nine tests that failed on an H100, with their tracebacks",
        tuple(_tests(name, test) for name, test in FAILURES.items()),
    ),
    Stage(
        "tests",
        "all other tests that need a GPU: two never ran, and 21 were skipped on the H100",
        tuple(_tests(file.rpartition("/")[2].removesuffix(".py"), file) for file in TEST_FILES),
    ),
    Stage(
        "kernels",
        "roofs, the optimizer's passes, and each kernel of a step, which decide why predicted speed is off",
        (_contest("roofs-optimizer", "^optimizer", 90), _kernels()),
    ),
    Stage(
        "host",
        "the host's time by operation, of which 6 us are assumed, and of mezzo run, whose noise was too large",
        (_operations(), _host("mlp", 95), _host("gpt2", 105, "transformers")),
    ),
    Stage(
        "trainings",
        "the trainings of which articles give figures, and those that are predicted and not measured yet",
        (_zoo("articles"), _zoo("holdout")),
    ),
    Stage(
        "rivals",
        "captured and compiled steps beside torch.amp's, Accelerate's and Fabric's: only one captured model is measured",
        tuple(_rivals()),
    ),
    Stage(
        "waits",
        "the kernels under compute-sanitizer, and steps that may not wait for the device",
        (_sanitized(_checks("kernels", "cuda", 180)), _checks("waits", "cuda", 120)),
    ),
)


def dry(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """Return the stages with tiny cases that need no GPU, run by the same programs."""
    tiny, cpu, values = ("--device", "cpu", "--tiny"), ("--device", "cpu"), "tests/gpu/test_gpu_values.py"
    cases = {
        "failures": [_tests("norms", f"{values}::test_a_norm_with_one_bad_value_is_not_finite", marked="not gpu")],
        "tests": [_tests("values", values, marked="not gpu")],
        "kernels": [
            _contest("roofs-optimizer", "^optimizer", 90, *tiny),
            replace(_kernels("--cases", "tiny", *cpu), modules=()),
        ],
        "host": [_operations(*cpu, "--calls", "2")],
        "trainings": [replace(_zoo("tiny", *cpu), modules=())],
        "rivals": [_contest("captured", "^captured tiny_convnet", 120, *tiny)],
        "waits": [_checks("kernels", "cpu", 120), _checks("waits", "cpu", 120)],
    }
    return tuple(replace(stage, cases=tuple(cases[stage.name])) for stage in stages)
