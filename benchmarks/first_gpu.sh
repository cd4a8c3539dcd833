#!/usr/bin/env bash
# The first minutes on a GPU, in stages of at most eight: bash benchmarks/first_gpu.sh [--out FOLDER] [--minutes M] [--dry-run] [STAGE ...]
# PYTHON names the interpreter (python3). What it does and how to continue: benchmarks/gpu/first_gpu/__init__.py.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root:$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks first_gpu "$@"
