#!/usr/bin/env bash
# The first ten minutes on a real GPU: tests, compute-sanitizer, waits, then the benchmark; one folder of results.
#
#   bash benchmarks/first_gpu.sh [FOLDER]
#
# PYTHON names the interpreter (python3), MINUTES the benchmark's budget (6). Installs nothing: a step whose tool is missing is reported
# as not run. Every step leaves a log; steps.tsv has its exit code, and where.txt describes the machine. Exit code: 0 if every step that
# ran succeeded, 1 if one did not, 3 if there is no GPU.
set -u

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-6}
OUT=${1:-runs/first-gpu/$(date -u +%Y%m%dT%H%M%S)}
export PYTHONPATH="$PWD:$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

# Both may have spaces, and a command is a line of text.
python=$(printf %q "$PYTHON") out=$(printf %q "$OUT")
# name, time limit in seconds, tool that it needs in addition to torch, command
STEPS=(
  # Other packages on the machine may warn: unlike in CI, warnings are not errors here.
  "tests|480|pytest|$python -m pytest -q -m gpu -p no:cacheprovider -o filterwarnings=default --continue-on-collection-errors tests"
  "sanitizer|180|compute-sanitizer|compute-sanitizer --tool memcheck --error-exitcode 9 $python -m benchmarks.contest.first kernels"
  "waits|120||$python -m benchmarks.contest.first waits"
  "benchmark|$(awk "BEGIN { print int($MINUTES * 60 + 60) }")||$python benchmarks/gpu.py --minutes $MINUTES --out $out"
)

has() {
  case $1 in
    "") true ;;
    pytest) "$PYTHON" -c "import pytest" 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

gpu() {
  "$PYTHON" -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)" 2>/dev/null
}

if ! gpu; then
  echo "no GPU: torch.cuda.is_available() is false for $PYTHON. Nothing was run and nothing was written. On a GPU this would run:"
  for step in "${STEPS[@]}"; do
    IFS="|" read -r name seconds needs command <<<"$step"
    echo "  $name (at most $seconds s${needs:+, needs $needs}): $command"
  done
  exit 3
fi

mkdir -p "$OUT"
{
  date -u +"date: %Y-%m-%dT%H:%M:%SZ"
  echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
  echo "changed files: $(git status --porcelain 2>/dev/null | wc -l)"
  "$PYTHON" - <<'PY'
import importlib.metadata, platform

print("python:", platform.python_version())
for name in ("torch", "triton", "numpy", "torchao", "transformers", "timm", "accelerate", "lightning", "pytest"):
    try:
        print(f"{name}:", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(f"{name}: not installed")
PY
  nvidia-smi 2>&1 || rocm-smi 2>&1
} >"$OUT/where.txt"

printf "step\texit code\tseconds\tlog\n" >"$OUT/steps.tsv"
worst=0
for step in "${STEPS[@]}"; do
  IFS="|" read -r name seconds needs command <<<"$step"
  if ! has "$needs"; then
    printf "%s\tnot run: %s is missing\t0\t\n" "$name" "$needs" | tee -a "$OUT/steps.tsv"
    continue
  fi
  started=$SECONDS
  timeout --kill-after=10 "$seconds" bash -c "exec $command" >"$OUT/$name.log" 2>&1
  code=$?
  [ $code -ne 0 ] && worst=1
  printf "%s\t%s\t%s\t%s\n" "$name" "$code" "$((SECONDS - started))" "$name.log" | tee -a "$OUT/steps.tsv"
done
echo "results: $OUT"
exit $worst
